"""Mixture of Block Attention as a function of arrays."""

from kernels_pallas.moba import choose_blocks, dot_flops, moba_attention

__all__ = ["choose_blocks", "dot_flops", "moba_attention"]
