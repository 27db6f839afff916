"""Multi-head self-attention, full or block-sparse."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from modo.nn.convolution import KeyConvolution
from modo.nn.partition import MESH_AXES, dividing_axes
from modo.nn.rope import rotary_embedding
from modo.ops.attention import causal_attention
from modo.ops.moba import moba_attention, sharded_moba_attention


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions; MoBA when `block_size` is given.

    Args:
      d_model: width in and out.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides num_heads.
      head_dim: width of a head, even.
      block_size: keys a block of Mixture of Block Attention; None: full attention.
      top_k, sink_blocks, window_blocks: of `modo.moba_attention`.
      key_convolution: keys that each key is convolved with, its own included, before its norm and
        rotary embedding (see `KeyConvolution`); None: none.
      implementation: of `modo.moba_attention`.
      qk_norm: RMSNorm on each head's queries and keys, before the rotary embedding.
      soft_cap: attention scores become c tanh(scores / c).
      rope_theta: base of the rotary embedding.
      norm_eps: epsilon of the norms.
      out_std: standard deviation of the output matrix at the start.
      dtype: of the computation; parameters are float32.
      mesh: the devices that share the work, with the axes of `modo.nn.partition.MESH_AXES`; None:
        one, or the compiler is left to cut attention as it can.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        block_size: int | None = None,
        top_k: int = 3,
        sink_blocks: int = 0,
        window_blocks: int = 0,
        key_convolution: int | None = None,
        implementation: str | None = None,
        qk_norm: bool = False,
        soft_cap: float | None = None,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-6,
        out_std: float | None = None,
        dtype=jnp.float32,
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.mesh = num_heads, mesh
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.block_size, self.top_k, self.implementation = block_size, top_k, implementation
        self.sink_blocks, self.window_blocks = sink_blocks, window_blocks
        self.soft_cap, self.rope_theta = soft_cap, rope_theta
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        into = nnx.initializers.normal(d_model**-0.5)
        out = nnx.initializers.normal(width**-0.5 if out_std is None else out_std)
        options = dict(use_bias=False, dtype=dtype, rngs=rngs)
        self.query = nnx.Linear(d_model, width, kernel_init=into, **options)
        self.key = nnx.Linear(d_model, kv_width, kernel_init=into, **options)
        self.value = nnx.Linear(d_model, kv_width, kernel_init=into, **options)
        self.out = nnx.Linear(width, d_model, kernel_init=out, **options)
        self.key_convolution = (
            KeyConvolution(self.num_kv_heads, self.head_dim, key_convolution, dtype=dtype)
            if key_convolution is not None
            else None
        )
        norm = dict(epsilon=norm_eps, dtype=dtype, rngs=rngs)
        self.query_norm = nnx.RMSNorm(self.head_dim, **norm) if qk_norm else None
        self.key_norm = nnx.RMSNorm(self.head_dim, **norm) if qk_norm else None

    def queries(self, x_BTD: Array, positions_BT: Array) -> Array:
        """Queries [B, T, N, H] as they meet keys in the scores."""
        q_BTNH = self.query(x_BTD).reshape(*x_BTD.shape[:2], self.num_heads, self.head_dim)
        if self.query_norm is not None:
            q_BTNH = self.query_norm(q_BTNH)
        return rotary_embedding(q_BTNH, positions_BT, self.rope_theta)

    def raw_keys(self, x_BTD: Array) -> Array:
        """Keys [B, T, K, H] before their convolution, norm and rotary embedding."""
        return self.key(x_BTD).reshape(*x_BTD.shape[:2], self.num_kv_heads, self.head_dim)

    def finish_keys(
        self,
        k_BTKH: Array,
        positions_BT: Array,
        segment_ids_BT: Array | None = None,
        before_BLKH: Array | None = None,
    ) -> Array:
        """Raw keys as they meet queries in the scores; `before_BLKH`: see `KeyConvolution`."""
        if self.key_convolution is not None:
            k_BTKH = self.key_convolution(k_BTKH, segment_ids_BT, before_BLKH)
        if self.key_norm is not None:
            k_BTKH = self.key_norm(k_BTKH)
        return rotary_embedding(k_BTKH, positions_BT, self.rope_theta)

    def queries_and_keys(
        self, x_BTD: Array, positions_BT: Array, segment_ids_BT: Array | None = None
    ) -> tuple[Array, Array]:
        """Queries [B, T, N, H] and keys [B, T, K, H] as they meet in the scores."""
        k_BTKH = self.finish_keys(self.raw_keys(x_BTD), positions_BT, segment_ids_BT)
        return self.queries(x_BTD, positions_BT), k_BTKH

    def values(self, x_BTD: Array) -> Array:
        """Values [B, T, K, H]."""
        return self.value(x_BTD).reshape(*x_BTD.shape[:2], self.num_kv_heads, self.head_dim)

    def attend(
        self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segment_ids_BT: Array | None = None
    ) -> Array:
        """Attention [B, T, N, H] within documents, full or block-sparse."""
        if self.mesh is not None and self.implementation != "reference":
            return self._attend_on_mesh(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
        if self.block_size is None:
            return causal_attention(
                q_BTNH, k_BTKH, v_BTKH, segment_ids=segment_ids_BT, soft_cap=self.soft_cap
            )
        return moba_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            block_size=self.block_size,
            top_k=self.top_k,
            segment_ids=segment_ids_BT,
            soft_cap=self.soft_cap,
            sink_blocks=self.sink_blocks,
            window_blocks=self.window_blocks,
            implementation=self.implementation,
        )

    def _attend_on_mesh(self, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> Array:
        """The same, every device for its rows, heads and tokens."""
        B, T = q_BTNH.shape[:2]
        context = dividing_axes(self.mesh, T, "length")
        full = self.block_size is None
        return sharded_moba_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            # Full attention is that to a document's only block.
            block_size=T if full else self.block_size,
            top_k=1 if full else self.top_k,
            segment_ids=segment_ids_BT,
            soft_cap=self.soft_cap,
            sink_blocks=self.sink_blocks,
            window_blocks=self.window_blocks,
            implementation=self.implementation,
            mesh=self.mesh,
            batch_axes=dividing_axes(self.mesh, B, "batch"),
            head_axis=MESH_AXES["heads"][0],
            context_axis=context[0] if context else None,
        )

    def output(self, y_BTNH: Array) -> Array:
        """What the heads found, [B, T, D]."""
        return self.out(y_BTNH.reshape(*y_BTNH.shape[:2], -1))

    def __call__(
        self, x_BTD: Array, *, positions_BT: Array, segment_ids_BT: Array | None = None
    ) -> Array:
        """Attends within documents (runs of equal segment ids, numbered apart; 0 is padding)."""
        q_BTNH, k_BTKH = self.queries_and_keys(x_BTD, positions_BT, segment_ids_BT)
        return self.output(self.attend(q_BTNH, k_BTKH, self.values(x_BTD), segment_ids_BT))
