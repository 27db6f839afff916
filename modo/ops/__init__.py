"""Pure functions of arrays."""

from modo.ops.attention import causal_attention
from modo.ops.losses import chunked_cross_entropy, cross_entropy
from modo.ops.moba import moba_attention, sharded_moba_attention
from modo.ops.routing import Route, combine, dispatch, route_top_k, route_where
from modo.ops.segments import document_runs

__all__ = [
    "Route",
    "causal_attention",
    "chunked_cross_entropy",
    "combine",
    "cross_entropy",
    "dispatch",
    "document_runs",
    "moba_attention",
    "route_top_k",
    "route_where",
    "sharded_moba_attention",
]
