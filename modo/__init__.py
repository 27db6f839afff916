"""modo: decoder language models with conditional compute.

Importing it starts no backend. `load`, `load_tokenizer` and `generate` are imported when first
used, because opening a run needs Orbax.
"""

from modo.config import Config, DepthConfig, MobaConfig, ModelConfig
from modo.nn.decoder import Decoder
from modo.ops.moba import moba_attention

__all__ = [
    "Config",
    "Decoder",
    "DepthConfig",
    "MobaConfig",
    "ModelConfig",
    "generate",
    "load",
    "load_tokenizer",
    "moba_attention",
]


def __getattr__(name: str):
    if name == "generate":
        from modo.decode import generate

        return generate
    if name in ("load", "load_tokenizer"):
        from modo.train import load as module

        return getattr(module, name)
    raise AttributeError(f"module 'modo' has no attribute {name!r}")
