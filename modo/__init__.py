"""modo: decoder language models with conditional compute.

Importing it starts no backend. Names are imported when first used: JAX and Orbax take seconds, and
a command line with a mistake need not wait for them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modo import decode
    from modo.config import Config, DepthConfig, MobaConfig, ModelConfig
    from modo.decode import generate
    from modo.nn.decoder import Decoder
    from modo.ops.moba import moba_attention
    from modo.train.load import load, load_tokenizer

__all__ = [
    "Config",
    "Decoder",
    "DepthConfig",
    "MobaConfig",
    "ModelConfig",
    "decode",
    "generate",
    "load",
    "load_tokenizer",
    "moba_attention",
]

_MODULES = {
    "Config": "modo.config",
    "Decoder": "modo.nn.decoder",
    "DepthConfig": "modo.config",
    "MobaConfig": "modo.config",
    "ModelConfig": "modo.config",
    "generate": "modo.decode",
    "load": "modo.train.load",
    "load_tokenizer": "modo.train.load",
    "moba_attention": "modo.ops.moba",
}


def __getattr__(name: str):
    if name in ("decode", "nn", "ops"):
        return importlib.import_module(f"modo.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'modo' has no attribute {name!r}")
