"""Flax nnx modules."""

from modo.nn.attention import Attention
from modo.nn.convolution import KeyConvolution
from modo.nn.decoder import Block, Decoder, DecoderAux
from modo.nn.depth import DepthAux, MixtureOfDepths, Predictor
from modo.nn.mlp import GatedMLP

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "DecoderAux",
    "DepthAux",
    "GatedMLP",
    "KeyConvolution",
    "MixtureOfDepths",
    "Predictor",
]
