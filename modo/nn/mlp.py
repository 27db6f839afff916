"""Gated MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)): the SwiGLU MLP (Shazeer 2020, arXiv 2002.05202), no biases.

    Args:
      d_model: width in and out.
      d_ff: hidden width.
      out_std: standard deviation of the output matrix at the start.
      dtype: of the computation; parameters are float32.
    """

    def __init__(
        self, d_model: int, d_ff: int, *, out_std: float | None = None, dtype=jnp.float32, rngs
    ):
        into = nnx.initializers.normal(d_model**-0.5)
        out = nnx.initializers.normal(d_ff**-0.5 if out_std is None else out_std)
        options = dict(use_bias=False, dtype=dtype, rngs=rngs)
        self.gate = nnx.Linear(d_model, d_ff, kernel_init=into, **options)
        self.up = nnx.Linear(d_model, d_ff, kernel_init=into, **options)
        self.down = nnx.Linear(d_ff, d_model, kernel_init=out, **options)

    def __call__(self, x_BTD: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))
