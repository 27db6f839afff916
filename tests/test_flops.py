import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modo import Decoder, DepthConfig, MobaConfig, ModelConfig, flops
from modo.config import Config, TrainConfig
from modo.train.step import loss_and_gradients
from tests.jaxpr import dot_flops

BASE = ModelConfig(vocab_size=48, d_model=32, num_layers=4, num_heads=4, d_ff=40)
DEPTH = DepthConfig(capacity=0.25)
MOBA = MobaConfig(block_size=4, top_k=2)

MODELS = {
    "dense": BASE,
    "grouped": dataclasses.replace(BASE, num_kv_heads=2, head_dim=6, tied_embeddings=True),
    "depth": dataclasses.replace(BASE, depth=DEPTH),
    "depth_without_predictor": dataclasses.replace(
        BASE, depth=DepthConfig(capacity=0.25, predictor=False)
    ),
    "depth_per_layer": dataclasses.replace(
        BASE, depth=DepthConfig(layers=(0, 1, 3), capacity=(0.1, 0.5, 1.0), predictor_width=7)
    ),
    "moba": dataclasses.replace(BASE, moba=MOBA, num_kv_heads=1),
    "moba_long_rows": dataclasses.replace(
        BASE, moba=MobaConfig(block_size=8, top_k=3, last_full=1)
    ),
    "fixed_gate": dataclasses.replace(
        BASE,
        moba=MobaConfig(
            block_size=4, top_k=3, sink_blocks=1, window_blocks=1, key_convolution=3, last_full=1
        ),
    ),
    "both": dataclasses.replace(BASE, depth=DEPTH, moba=MOBA, num_kv_heads=2),
    "capped": dataclasses.replace(
        BASE, depth=DEPTH, attention_soft_cap=5.0, logit_soft_cap=9.0, qk_norm=True
    ),
}
CASES = [(name, 32, False, number % 2 == 0) for number, name in enumerate(MODELS)] + [
    ("dense", 9, True, True),
    ("depth", 31, True, False),
    ("depth", 1, False, True),
    ("moba", 37, True, True),
    ("moba_long_rows", 200, False, False),
    ("both", 37, True, True),
    ("both", 7, False, False),
]


def _split(model: ModelConfig):
    return nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))


def _forward_flops(model, batch, length, segments):
    graphdef, params = _split(model)

    def forward(params, tokens_BT, segment_ids_BT):
        return nnx.merge(graphdef, params)(tokens_BT, segment_ids_BT=segment_ids_BT)[0]

    ids_BT = jnp.ones((batch, length), jnp.int32)
    return dot_flops(forward, params, ids_BT, ids_BT if segments else None)


def _step_flops(model, batch, length, segments):
    graphdef, params = _split(model)
    config = Config(model, train=TrainConfig(batch_size=batch, length=length))
    ids_BT = jnp.ones((batch, length), jnp.int32)
    rows = {"tokens_BT": ids_BT, "targets_BT": ids_BT, "weights_BT": ids_BT.astype(jnp.float32)}
    if segments:
        rows["segment_ids_BT"] = ids_BT
    return dot_flops(
        lambda params, rows: loss_and_gradients(params, graphdef, rows, jax.random.key(0), config),
        params,
        rows,
    )


@pytest.mark.parametrize(("name", "length", "segments", "scan_layers"), CASES)
def test_counts_equal_the_products_of_the_jaxpr(name, length, segments, scan_layers):
    model = dataclasses.replace(MODELS[name], scan_layers=scan_layers)
    counted = flops.forward(model, length, batch=2, segments=segments)
    assert counted == _forward_flops(model, 2, length, segments)
    assert flops.train_step(model, 2, length, segments=segments) == _step_flops(
        model, 2, length, segments
    )


def test_jaxpr_count_of_known_products():
    x, w = jnp.ones((3, 5)), jnp.ones((5, 5))
    assert dot_flops(lambda x: x @ w, x) == 2 * 3 * 5 * 5
    assert dot_flops(jax.jit(lambda x: x @ w + x @ w), x) == 4 * 3 * 5 * 5

    def scanned(x):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=7)[0]

    assert dot_flops(scanned, x) == 7 * 2 * 3 * 5 * 5
    loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(scanned(x))))
    # Forward, again in the backward pass, and the input's gradient.
    assert dot_flops(jax.grad(loss), x) == 3 * 7 * 2 * 3 * 5 * 5
    assert dot_flops(lambda x: jnp.einsum("bij,bjk->bik", x, x), jnp.ones((4, 3, 3))) == 2 * 4 * 27


def test_routing_saves_what_the_method_says():
    # arXiv 2404.02258: T = 2048, 12.5 % of the tokens in every other block.
    for d_model, share in ((512, 0.541), (2048, 0.555)):
        model = ModelConfig(
            vocab_size=1,
            d_model=d_model,
            num_layers=8,
            num_heads=d_model // 64,
            d_ff=4 * d_model,
            depth=DepthConfig(predictor=False),
        )
        dense = flops.dense_twin(model)
        head = 2 * 2048 * d_model
        body = flops.forward(model, 2048) - head
        assert abs(body / (flops.forward(dense, 2048) - head) - share) < 0.01


@pytest.mark.quick
@pytest.mark.parametrize("name", MODELS)
def test_parameter_count_is_the_size_of_the_leaves(name):
    for changes in ({}, {"scan_layers": True}, {"tied_embeddings": True, "qk_norm": True}):
        model = dataclasses.replace(MODELS[name], **changes)
        leaves = jax.tree.leaves(_split(model)[1])
        assert flops.parameter_count(model) == sum(math.prod(leaf.shape) for leaf in leaves)


def test_dense_twin_computes_every_token():
    model = MODELS["both"]
    assert flops.dense_twin(model) == dataclasses.replace(model, depth=None, moba=None)
    assert flops.forward(model, 512) < flops.forward(flops.dense_twin(model), 512)
    full = dataclasses.replace(BASE, depth=DepthConfig(capacity=1.0, predictor=False))
    extra = flops.forward(full, 32) - flops.forward(BASE, 32)
    assert extra == 2 * 2 * 32 * 32  # two routers


class _Device:
    def __init__(self, device_kind):
        self.device_kind = device_kind


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("TPU v5", 459e12), ("TPU v5 lite", 197e12), ("TPU v4", 275e12), ("NVIDIA H200", 989e12),
     ("NVIDIA H100 80GB HBM3", 989e12), ("TPU v50", math.nan), ("cpu", math.nan)],
)  # fmt: skip
def test_peak_flops(kind, peak):
    np.testing.assert_equal(flops.peak_flops(_Device(kind)), peak)
