"""Decoding: caches, the forward pass through them, generation."""

from modo.decode.cache import (
    Cache,
    LayerCache,
    cache_shardings,
    init_cache,
    reset,
    roll_back,
    take_rows,
)
from modo.decode.forward import prefill, step
from modo.decode.generate import generate, stream
from modo.decode.sampling import Sampling

__all__ = [
    "Cache",
    "LayerCache",
    "Sampling",
    "cache_shardings",
    "generate",
    "init_cache",
    "prefill",
    "reset",
    "roll_back",
    "step",
    "stream",
    "take_rows",
]
