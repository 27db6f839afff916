"""modo: decoder language models with conditional compute."""

from modo.config import Config, DepthConfig, MobaConfig, ModelConfig
from modo.nn.decoder import Decoder
from modo.ops.moba import moba_attention

__all__ = [
    "Config",
    "Decoder",
    "DepthConfig",
    "MobaConfig",
    "ModelConfig",
    "moba_attention",
]
