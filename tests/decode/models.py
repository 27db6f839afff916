"""Small models of every kind, whose routing is not trivial."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import modo

VOCAB = 30
_COMMON = dict(
    vocab_size=VOCAB, d_model=32, num_layers=4, num_heads=4, num_kv_heads=2, d_ff=48, qk_norm=True
)
CONFIGS = {
    "full": modo.ModelConfig(**_COMMON, attention_soft_cap=2.0, tied_embeddings=True),
    "moba": modo.ModelConfig(
        **_COMMON, moba=modo.MobaConfig(block_size=4, top_k=3, window_blocks=1, last_full=1)
    ),
    "mod": modo.ModelConfig(
        **_COMMON, depth=modo.DepthConfig(capacity=0.3, gate="tanh", gate_on="mlp")
    ),
    "both": modo.ModelConfig(
        **_COMMON,
        moba=modo.MobaConfig(block_size=4, top_k=2, key_convolution=3),
        depth=modo.DepthConfig(layers=(1, 2), capacity=(0.3, 0.9)),
    ),
}


def make_model(config: modo.ModelConfig, *, bias: float = 0.0, seed: int = 0) -> modo.Decoder:
    """A model as if trained: no parameter is at its start, and predictors choose by token."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        names = jax.tree_util.keystr(path)
        noise = rng.standard_normal(x.shape)
        if "bias" in names:
            noise = np.full(x.shape, bias) if "score" in names else 0.1 * noise
        elif "norm" in names:
            noise = 1 + 0.1 * noise
        elif "score" in names:
            noise = 3 * noise
        elif "kernel" in names:
            noise = noise * x.shape[-2] ** -0.5
        return jnp.asarray(noise, x.dtype)

    graphdef, params = nnx.split(nnx.eval_shape(lambda: modo.Decoder(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, params))


def some_tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length), dtype=np.int32)


@functools.partial(jax.jit, static_argnames=("graphdef", "routing"))
def _forward(graphdef, params, tokens_BT, routing):
    logits, aux = nnx.merge(graphdef, params)(tokens_BT, routing=routing)
    return logits, aux.routed_LBT


def forward(model, tokens_BT, routing="predictor"):
    """Logits and routed tokens of the parallel causal pass."""
    return jax.tree.map(np.asarray, _forward(*nnx.split(model), tokens_BT, routing=routing))
