"""Mixture of Block Attention as a function of arrays."""

from kernels_pallas.moba import choose_blocks, dot_flops, moba_attention
from kernels_pallas.moba.sharded import sharded_moba_attention

__all__ = ["choose_blocks", "dot_flops", "moba_attention", "sharded_moba_attention"]
