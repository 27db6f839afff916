"""modo: decoder language models with conditional compute.

Importing it starts no backend. `load` and `load_tokenizer` are imported when first used, because
opening a run needs Orbax.
"""

from modo import decode
from modo.config import Config, DepthConfig, MobaConfig, ModelConfig
from modo.decode import generate
from modo.nn.decoder import Decoder
from modo.ops.moba import moba_attention

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


def __getattr__(name: str):
    if name in ("load", "load_tokenizer"):
        from modo.train import load as module

        return getattr(module, name)
    raise AttributeError(f"module 'modo' has no attribute {name!r}")
