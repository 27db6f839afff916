import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modo import Decoder, DepthConfig, MobaConfig, ModelConfig
from modo.nn import Attention, MixtureOfDepths
from modo.nn.decoder import layer_kinds, repeating_stretches
from modo.nn.rope import rotary_embedding

V, T = 32, 16
DEPTH = DepthConfig(layers=(1, 2), capacity=0.25)
BASE = ModelConfig(vocab_size=V, d_model=16, num_layers=3, num_heads=2, d_ff=24, depth=DEPTH)
SEGMENTS = np.asarray(
    [[1] * 16, [1] * 6 + [2] * 7 + [0] * 3, [0] * 4 + [1, 1, 2, 2, 1, 1] + [3] * 6]
)
B = len(SEGMENTS)

# Most of the time here goes into compiling small programs.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


@functools.partial(quick_jit, static_argnames=("graphdef", "routing"))
def _call(graphdef, state, tokens_BT, positions_BT, segment_ids_BT, key, routing):
    return nnx.merge(graphdef, state)(
        tokens_BT,
        positions_BT=positions_BT,
        segment_ids_BT=segment_ids_BT,
        routing=routing,
        key=key,
    )


def call(model, tokens_BT, *, positions_BT=None, segment_ids_BT=None, routing="top_k", key=None):
    return _call(*nnx.split(model), tokens_BT, positions_BT, segment_ids_BT, key, routing=routing)


@functools.lru_cache
def _state(config, seed):
    make = quick_jit(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(seed))))
    return make()


def decoder(seed=0, config=BASE, **changes) -> Decoder:
    """A model whose predictors tell tokens apart."""
    config = dataclasses.replace(config, **changes)
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(seed))))[0]
    # A copy: what a test does to its model must not reach the next one's.
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, _state(config, seed)))
    for block in model.blocks:
        if isinstance(block, MixtureOfDepths) and block.predictor is not None:
            kernel = block.predictor.score.kernel
            kernel[...] = 2 * jax.random.normal(jax.random.key(seed), kernel.shape)
            block.predictor.score.bias[...] = jnp.zeros(1)
    return model


def tokens(seed=0, batch=B, length=T):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, V)


# --- Layers --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_layers_are_what_the_config_says():
    config = dataclasses.replace(
        BASE,
        num_layers=6,
        depth=DepthConfig(
            layers=(0, 2, 5), capacity=(0.25, 0.5, 1.0), gate=("linear", "tanh", "sigmoid")
        ),
        moba=MobaConfig(block_size=4, top_k=2, layers=(1, 2)),
    )
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    routed = {0: (0.25, "linear"), 2: (0.5, "tanh"), 5: (1.0, "sigmoid")}
    for layer in range(6):
        block = model.block(layer)
        assert isinstance(block, MixtureOfDepths) == (layer in routed)
        if layer in routed:
            assert (block.capacity, block.gate) == routed[layer]
            block = block.block
        assert block.attention.block_size == (4 if layer in (1, 2) else None)
        assert block.attention.top_k == (2 if layer in (1, 2) else 1)


@pytest.mark.quick
def test_one_router_and_predictor_a_routed_block():
    model = decoder()
    routers = [model.block(layer).router.kernel[...] for layer in (1, 2)]
    assert not np.array_equal(*routers)
    predictors = [model.block(layer).predictor.hidden.kernel[...] for layer in (1, 2)]
    assert not np.array_equal(*predictors)
    # Each layer listens to its own.
    _, aux = call(model, tokens())
    model.block(2).router.kernel[...] = -routers[1]
    _, moved = call(model, tokens())
    np.testing.assert_array_equal(aux.routed_LBT[0], moved.routed_LBT[0])
    np.testing.assert_array_equal(aux.router_logits_LBT[1], -moved.router_logits_LBT[1])


def test_capacity_of_each_layer():
    depth = DepthConfig(layers=(0, 1, 2), capacity=(0.25, 0.5, 1.0))
    _, aux = call(decoder(depth=depth), tokens(), segment_ids_BT=SEGMENTS)
    expected = [[round(c * n) for n in (16, 13, 12)] for c in depth.capacity]
    assert aux.routed_LBT.sum(axis=2).tolist() == expected
    np.testing.assert_allclose(aux.statistics["fraction"], np.sum(expected) / 3 / 41, rtol=1e-6)


@pytest.mark.quick
def test_stretches_cover_the_layers_in_order():
    for kinds in ("aaaa", "abab", "aabbb", "abc", "abababc", "aab" * 3, "a", "ababcdcdcd"):
        stretches, layer = repeating_stretches(list(kinds)), 0
        for start, period, repeats in stretches:
            assert start == layer
            group = kinds[start : start + period]
            assert kinds[start : start + period * repeats] == group * repeats
            layer += period * repeats
        assert layer == len(kinds)
    assert repeating_stretches(list("abababc")) == [(0, 2, 3), (6, 1, 1)]
    assert len(set(layer_kinds(BASE))) == 2


# --- Scan and rematerialisation ------------------------------------------------------------------

BOTH = dataclasses.replace(
    BASE,
    num_layers=5,
    depth=DepthConfig(layers=(1, 3, 4), capacity=0.25, noise=1.0, gate="sigmoid"),
    moba=MobaConfig(block_size=4, top_k=2, layers=(1, 3)),
)


@functools.partial(quick_jit, static_argnames="graphdef")
def _loss_and_gradients(graphdef, state, key):
    def loss(state):
        logits_BTV, aux = nnx.merge(graphdef, state)(
            tokens(), segment_ids_BT=jnp.asarray(SEGMENTS), key=key
        )
        mask_BT1 = jnp.asarray(SEGMENTS != 0)[..., None]
        total = jnp.sum(jnp.sin(logits_BTV) * mask_BT1) / mask_BT1.size
        return total + aux.router_loss + aux.predictor_loss, aux

    return jax.value_and_grad(loss, has_aux=True)(state)


def _stacked(model, states):
    """Unscanned per-layer states in the layout of a scanned model's."""
    groups = []
    for start, period, repeats in model.stretches:
        layers = [[states[start + r * period + p] for r in range(repeats)] for p in range(period)]
        groups.append([jax.tree.map(lambda *x: np.stack(x), *same) for same in layers])
    return jax.tree.leaves(groups)


def test_scan_and_remat_change_nothing():
    key = jax.random.key(7)
    plain = decoder(config=BOTH)
    (loss, aux), grads = _loss_and_gradients(*nnx.split(plain), key)
    assert not np.array_equal(aux.routed_LBT[0], aux.routed_LBT[1])
    model = decoder(config=dataclasses.replace(BOTH, remat="block"))
    (other, other_aux), other_grads = _loss_and_gradients(*nnx.split(model), key)
    np.testing.assert_array_equal(other_aux.routed_LBT, aux.routed_LBT)
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(other_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

    scanned_config = dataclasses.replace(BOTH, scan_layers=True, remat="dots")
    scanned = decoder(config=scanned_config)
    assert [s.repeats for s in scanned.stretches] == [2, 1]
    blocks = [nnx.state(block) for block in plain.blocks]
    state = nnx.state(scanned)
    tree = jax.tree.structure(state["blocks"])
    state["blocks"] = jax.tree.unflatten(tree, _stacked(scanned, blocks))
    nnx.update(scanned, state)
    (other, other_aux), other_grads = _loss_and_gradients(*nnx.split(scanned), key)
    for a, b in zip(jax.tree.leaves(other_aux), jax.tree.leaves(aux), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    layer_grads = [grads["blocks"][layer] for layer in range(5)]
    for a, b in zip(
        jax.tree.leaves(other_grads["blocks"]), _stacked(scanned, layer_grads), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for layer in range(5):
        ours, theirs = (jax.tree.leaves(nnx.state(m.block(layer))) for m in (plain, scanned))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_scanned_models_start_with_the_same_parameters():
    config = dataclasses.replace(BASE, scan_layers=True)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    plain, scanned = _state(BASE, 0), _state(config, 0)
    expected = _stacked(model, [plain["blocks"][layer] for layer in range(3)])
    for a, b in zip(jax.tree.leaves(scanned["blocks"]), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    for name in ("embedding", "norm", "head"):
        for a, b in zip(jax.tree.leaves(scanned[name]), jax.tree.leaves(plain[name]), strict=True):
            np.testing.assert_array_equal(a, b)


# --- Routing -------------------------------------------------------------------------------------


def test_every_routing_is_its_own_and_finite():
    model, tokens_BT = decoder(compute_dtype="bfloat16"), tokens()
    logits = {}
    for routing in ("top_k", "predictor", "router", "random"):
        logits_BTV, aux = call(
            model, tokens_BT, segment_ids_BT=SEGMENTS, routing=routing, key=jax.random.key(0)
        )
        assert logits_BTV.dtype == jnp.float32
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((logits_BTV, aux)))
        assert not np.any(np.asarray(aux.routed_LBT) & (SEGMENTS == 0))
        if routing in ("predictor", "router"):
            score_LBT = getattr(aux, f"{routing}_logits_LBT")
            np.testing.assert_array_equal(aux.routed_LBT, (score_LBT > 0) & (SEGMENTS != 0))
        logits[routing] = np.asarray(logits_BTV)
    names = list(logits)
    for a in range(4):
        for b in range(a):
            assert not np.allclose(logits[names[a]], logits[names[b]], atol=1e-3)


def test_layers_draw_apart_and_the_key_decides():
    model, tokens_BT = decoder(), tokens(batch=8)
    run = functools.partial(call, model, tokens_BT, routing="random")
    (first, aux), (again, _), (_, other) = (run(key=jax.random.key(s)) for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(aux.routed_LBT[0], aux.routed_LBT[1])
    assert not np.array_equal(aux.routed_LBT, other.routed_LBT)


@pytest.mark.quick
def test_targets_of_a_batch_are_its_selection():
    _, aux = call(decoder(), tokens(), segment_ids_BT=SEGMENTS)
    valid_BT = SEGMENTS != 0
    k_B = [max(1, round(0.25 * n)) for n in valid_BT.sum(1)]
    assert aux.routed_LBT.sum(axis=2).tolist() == [k_B, k_B]

    def nats(logits_LBT):
        signed = np.where(aux.routed_LBT, -1, 1) * np.asarray(logits_LBT, np.float64)
        return np.logaddexp(0, signed)[:, valid_BT].mean()

    np.testing.assert_allclose(aux.router_loss, nats(aux.router_logits_LBT), rtol=1e-5)
    np.testing.assert_allclose(aux.predictor_loss, nats(aux.predictor_logits_LBT), rtol=1e-5)


def test_statistics_are_means_over_layers_and_overlap():
    _, aux = call(
        decoder(depth=DepthConfig(every=1, capacity=0.5)), tokens(), segment_ids_BT=SEGMENTS
    )
    routed_LBT, valid_BT = np.asarray(aux.routed_LBT), SEGMENTS != 0
    both = (routed_LBT[:-1] & routed_LBT[1:]).sum()
    either = (routed_LBT[:-1] | routed_LBT[1:]).sum()
    assert 0 < both < either
    np.testing.assert_allclose(aux.statistics["layer_overlap"], both / either, rtol=1e-6)
    says_LBT = np.asarray(aux.predictor_logits_LBT) > 0
    agree = (says_LBT == routed_LBT)[:, valid_BT].mean()
    np.testing.assert_allclose(aux.statistics["predictor_accuracy"], agree, rtol=1e-6)
    hits_L = (says_LBT & routed_LBT).sum((1, 2))
    recall = np.mean(hits_L / routed_LBT.sum((1, 2)))
    precision = np.mean(hits_L / np.maximum((says_LBT & valid_BT).sum((1, 2)), 1))
    np.testing.assert_allclose(aux.statistics["predictor_recall"], recall, rtol=1e-6)
    np.testing.assert_allclose(aux.statistics["predictor_precision"], precision, rtol=1e-6)


def test_identical_layers_overlap_fully():
    model = decoder(depth=DepthConfig(every=1, capacity=0.5))
    for block in model.blocks:
        block.router.kernel[...] = jnp.zeros((16, 1))
    _, aux = call(model, tokens(), segment_ids_BT=SEGMENTS)
    assert aux.statistics["layer_overlap"] == 1


def test_no_routed_layers():
    _, aux = call(decoder(depth=None), tokens())
    assert aux.routed_LBT.shape == (0, B, T) and aux.statistics == {}
    assert aux.router_loss == 0 and aux.predictor_loss == 0


@pytest.mark.quick
@pytest.mark.parametrize("moba", [None, MobaConfig(block_size=4, top_k=2)])
def test_identity_gate_and_capacity_one_give_the_dense_model(moba):
    dense = decoder(depth=None, moba=moba)
    routed = decoder(depth=DepthConfig(capacity=1.0, gate="tanh", predictor=False), moba=moba)
    for ours, theirs in zip(routed.blocks, dense.blocks, strict=True):
        if isinstance(ours, MixtureOfDepths):
            ours.router.kernel[...] = jnp.zeros((16, 1))
            ours = ours.block
        nnx.update(ours, nnx.state(theirs))
    for name in ("embedding", "norm", "head"):
        nnx.update(getattr(routed, name), nnx.state(getattr(dense, name)))
    ours, theirs = (call(model, tokens(), segment_ids_BT=SEGMENTS)[0] for model in (routed, dense))
    whole = SEGMENTS.all(axis=1)
    assert whole.any()
    np.testing.assert_array_equal(ours[whole], theirs[whole])
    real_BT = SEGMENTS != 0
    np.testing.assert_allclose(
        np.asarray(ours)[real_BT], np.asarray(theirs)[real_BT], rtol=1e-5, atol=1e-6
    )


# --- Causality, documents, padding ---------------------------------------------------------------

MIXED = dataclasses.replace(BASE, moba=MobaConfig(block_size=3, top_k=2), num_kv_heads=1)


@pytest.mark.parametrize("routing", ["predictor", "router"])
def test_causal_routing_does_not_look_ahead(routing):
    model = decoder(config=MIXED)
    row_T, other_T = np.asarray(tokens(batch=2))
    # Row j keeps the first j tokens and changes all that follow.
    rows_BT = np.where(np.arange(T) >= np.arange(T)[:, None], (row_T + 1 + other_T % 30) % V, row_T)
    whole_BTV, whole = call(model, np.broadcast_to(row_T, (T, T)), routing=routing)
    logits_BTV, aux = call(model, rows_BT, routing=routing)
    assert 0 < whole.routed_LBT[:, 0].sum() < 2 * T
    for j in range(T):
        np.testing.assert_array_equal(aux.routed_LBT[:, j, :j], whole.routed_LBT[:, 0, :j])
        np.testing.assert_array_equal(logits_BTV[j, :j], whole_BTV[0, :j])
        assert not np.allclose(logits_BTV[j, j], whole_BTV[0, j])


def test_top_k_looks_ahead():
    # Else the causal routings would not be needed, and the test above would show nothing.
    model, tokens_BT = decoder(config=MIXED), tokens(batch=64)
    logits_BTV, aux = call(model, tokens_BT)
    # Not in place: JAX may still be reading the NumPy array that it was given.
    moved_BTV, moved = call(model, tokens_BT.at[:, -1].set((tokens_BT[:, -1] + 1) % V))
    assert not np.array_equal(aux.routed_LBT[0, :, :-1], moved.routed_LBT[0, :, :-1])
    assert not np.allclose(logits_BTV[:, :-1], moved_BTV[:, :-1])


@pytest.mark.parametrize("routing", ["predictor", "router"])
def test_a_packed_document_is_the_document_alone(routing):
    model, tokens_BT = decoder(config=MIXED), tokens(batch=1)
    positions_BT = np.asarray([[*range(6), *range(10)]])
    packed_BTV, packed = call(
        model,
        tokens_BT,
        positions_BT=positions_BT,
        segment_ids_BT=np.asarray([[1] * 6 + [2] * 10]),
        routing=routing,
    )
    alone_BTV, alone = call(model, tokens_BT[:, 6:], routing=routing)
    assert alone.routed_LBT.any() and not alone.routed_LBT.all()
    np.testing.assert_array_equal(packed.routed_LBT[..., 6:], alone.routed_LBT)
    np.testing.assert_allclose(packed_BTV[:, 6:], alone_BTV, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("routing", ["top_k", "predictor"])
def test_appended_padding_changes_nothing(routing):
    model, tokens_BT = decoder(config=MIXED), np.asarray(tokens())
    run = functools.partial(call, model, routing=routing)
    logits_BTV, aux = run(tokens_BT, segment_ids_BT=np.ones((B, T), int))
    segments_BT = np.pad(np.ones((B, T), int), ((0, 0), (0, 11)))
    for value in (0, 5, V - 1):
        padded_BT = np.pad(tokens_BT, ((0, 0), (0, 11)), constant_values=value)
        padded_BTV, padded = run(padded_BT, segment_ids_BT=segments_BT)
        np.testing.assert_array_equal(padded.routed_LBT[..., :T], aux.routed_LBT)
        assert not np.any(padded.routed_LBT[..., T:])
        np.testing.assert_allclose(padded_BTV[:, :T], logits_BTV, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(padded.predictor_loss, aux.predictor_loss, rtol=1e-5)
        assert np.isfinite(padded_BTV).all()


# --- The rest of the model -----------------------------------------------------------------------


def test_soft_cap_and_tied_embeddings():
    model = decoder(tied_embeddings=True, depth=None)
    assert model.head is None
    x_BTD = 5 * jax.random.normal(jax.random.key(0), (2, 3, 16))
    norm_BTD = x_BTD / np.sqrt(np.mean(np.square(x_BTD), -1, keepdims=True) + 1e-6)
    plain_BTV = np.asarray(norm_BTD) @ np.asarray(model.embedding.embedding[...]).T
    np.testing.assert_allclose(model.logits(x_BTD), plain_BTV, rtol=1e-4, atol=1e-5)
    model.config = dataclasses.replace(model.config, logit_soft_cap=0.5)
    np.testing.assert_allclose(
        model.logits(x_BTD), 0.5 * np.tanh(plain_BTV / 0.5), rtol=1e-4, atol=1e-5
    )


def test_attention_soft_cap_reaches_the_layers():
    wide, none, narrow = (
        decoder(attention_soft_cap=c, depth=None, num_layers=1) for c in (1e5, None, 0.05)
    )
    logits = [np.asarray(call(model, tokens())[0]) for model in (wide, none, narrow)]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    assert not np.allclose(logits[1], logits[2], atol=1e-3)


def test_queries_and_keys_are_normalised_then_rotated():
    attention = Attention(16, num_heads=4, num_kv_heads=2, qk_norm=True, rngs=nnx.Rngs(0))
    attention.query_norm.scale[...] = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    x_BTD = 30 * jax.random.normal(jax.random.key(0), (2, 5, 16))
    positions_BT = np.asarray([[0, 1, 2, 3, 4], [3, 9, 27, 81, 243]])
    q_BTNH, k_BTKH = attention.queries_and_keys(x_BTD, positions_BT)

    def by_hand(kernel, heads, scale_H):
        z = (np.asarray(x_BTD, np.float64) @ np.asarray(kernel, np.float64)).reshape(2, 5, heads, 4)
        z = z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-6) * scale_H
        out = np.zeros_like(z)
        for i, frequency in enumerate((1.0, 10_000.0**-0.5)):
            angle = positions_BT[:, :, None] * frequency
            # Each pair turns as a complex number does.
            turned = (z[..., i] + 1j * z[..., i + 2]) * np.exp(1j * angle)
            out[..., i], out[..., i + 2] = turned.real, turned.imag
        return out

    expected = by_hand(attention.query.kernel[...], 4, np.asarray([1, 2, 3, 4]))
    np.testing.assert_allclose(q_BTNH, expected, rtol=1e-3, atol=1e-4)
    expected = by_hand(attention.key.kernel[...], 2, np.ones(4))
    np.testing.assert_allclose(k_BTKH, expected, rtol=1e-3, atol=1e-4)


def test_rotary_scores_depend_on_distance_alone():
    q_BTNH, k_BTNH = jax.random.normal(jax.random.key(0), (2, 1, 6, 2, 8))

    def scores(offset):
        positions_BT = offset + jnp.arange(6)[None]
        q, k = (rotary_embedding(x, positions_BT, 10_000.0) for x in (q_BTNH, k_BTNH))
        return jnp.einsum("btnh,bsnh->bnts", q, k)

    np.testing.assert_allclose(scores(0), scores(1000), atol=2e-3)
    assert not np.allclose(scores(0), jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH), atol=0.1)


def test_one_compilation_for_all_batches():
    model = decoder()
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, tokens_BT, segment_ids_BT):
        return nnx.merge(graphdef, state)(tokens_BT, segment_ids_BT=segment_ids_BT)[0]

    for seed, segments_BT in enumerate((SEGMENTS, SEGMENTS[::-1], 0 * SEGMENTS)):
        assert np.isfinite(run(state, tokens(seed), segments_BT)).all()
    assert run._cache_size() == 1


def test_in_a_linen_model():
    config = dataclasses.replace(BASE, num_layers=2, depth=DepthConfig(capacity=0.25))
    linen = nnx.bridge.to_linen(lambda *, rngs: Decoder(config, rngs=rngs))
    variables = quick_jit(linen.init)(jax.random.key(0), tokens())
    logits_BTV, aux = quick_jit(linen.apply)(variables, tokens())
    assert logits_BTV.shape == (B, T, V) and aux.routed_LBT.sum() == B * 4
