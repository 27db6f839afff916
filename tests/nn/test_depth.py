"""Mixture-of-Depths around small blocks whose every number can be worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modo.nn import Attention, Block, GatedMLP, MixtureOfDepths
from modo.nn.depth import apply_gate
from modo.ops import document_runs

D = 16
T = 12
SEGMENTS = np.asarray(
    [
        [1] * 12,
        [1] * 5 + [2] * 7,
        [0] * 3 + [1] * 4 + [2] * 5,  # padding on the left
        [3] * 4 + [1] * 3 + [0] * 5,  # on the right
        [1] * 3 + [0] * 4 + [1] * 5,  # in the middle
        [1, 1, 2, 2, 1, 1, 3, 3, 3, 3, 0, 0],
        [0] * 12,
        [0] * 11 + [1],
    ]
)
B = len(SEGMENTS)


class ToyBlock(nnx.Module):
    """Mixes a token with the mean of its document so far, and with its position."""

    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(D**-0.5)
        self.own = nnx.Param(init(rngs.params(), (D, D)))
        self.context = nnx.Param(init(rngs.params(), (D, D)))

    def __call__(self, x_BCD, *, positions_BC, segment_ids_BC, gate_BC=None):
        C = x_BCD.shape[1]
        sees_BCC = segment_ids_BC[:, :, None] == segment_ids_BC[:, None, :]
        sees_BCC = (sees_BCC & jnp.tril(jnp.ones((C, C), bool))).astype(x_BCD.dtype)
        mean_BCD = sees_BCC @ x_BCD / jnp.sum(sees_BCC, axis=2, keepdims=True)
        mixed_BCD = jnp.tanh(x_BCD @ self.own[...] + mean_BCD @ self.context[...])
        return mixed_BCD + 0.1 * jnp.sin(positions_BC.astype(x_BCD.dtype))[..., None]


# Most of the time here goes into compiling small programs.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


@functools.partial(quick_jit, static_argnames=("graphdef", "routing"))
def _call(graphdef, state, x_BTD, positions_BT, segment_ids_BT, key, routing):
    return nnx.merge(graphdef, state)(
        x_BTD, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT, routing=routing, key=key
    )


def call(mod, x_BTD, *, positions_BT=None, segment_ids_BT=None, routing="top_k", key=None):
    return _call(*nnx.split(mod), x_BTD, positions_BT, segment_ids_BT, key, routing=routing)


def toy(seed=0, **options) -> MixtureOfDepths:
    rngs = nnx.Rngs(seed)
    options = {"capacity": 0.3, **options}
    mod = MixtureOfDepths(ToyBlock(rngs=rngs), D, rngs=rngs, **options)
    if mod.predictor is not None:
        # A fresh predictor scores every token alike.
        kernel = mod.predictor.score.kernel
        kernel[...] = 2 * jax.random.normal(jax.random.key(seed + 1), kernel.shape)
    return mod


def transformer_block(seed=0, *, block_size=None) -> Block:
    rngs = nnx.Rngs(seed)
    attention = Attention(D, num_heads=4, num_kv_heads=2, block_size=block_size, top_k=2, rngs=rngs)
    return Block(attention, GatedMLP(D, 24, rngs=rngs), D, rngs=rngs)


def tokens(seed=0, batch=B, length=T, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (batch, length, D), dtype)


def identity_gate(mod) -> None:
    """A tanh gate of a router of zeros is exactly 1."""
    mod.router.kernel[...] = jnp.zeros_like(mod.router.kernel[...])


# --- Eq. 1 in numpy, row by row and token by token, in float64 -----------------------------------


def _runs(segments_T) -> list[int]:
    runs, number, previous = [], 0, 0
    for segment in segments_T:
        number += segment != previous and segment != 0
        runs.append(number if segment else 0)
        previous = segment
    return runs


def numpy_gate(gate, r):
    return {"linear": r, "sigmoid": 1 / (1 + np.exp(-r)), "tanh": 1 + 0.2 * np.tanh(r)}[gate]


def numpy_route(mod, x_BTD, segments_BT, routing="top_k"):
    """(routed [B, T] bool, router logits, predictor logits)."""
    x_BTD = np.asarray(x_BTD, np.float64)
    logits_BT = x_BTD @ np.asarray(mod.router.kernel[...], np.float64)[:, 0]
    predictor_BT = None
    if mod.predictor is not None:
        square_BT1 = (x_BTD**2).mean(-1, keepdims=True) + 1e-6
        h = np.concatenate([x_BTD / np.sqrt(square_BT1), 0.5 * np.log(square_BT1)], -1)
        hidden, score = mod.predictor.hidden, mod.predictor.score
        h = h @ np.asarray(hidden.kernel[...], np.float64) + np.asarray(hidden.bias[...])
        h = h / (1 + np.exp(-h))
        predictor_BT = (h @ np.asarray(score.kernel[...], np.float64))[..., 0]
        predictor_BT += float(score.bias[...][0])
    routed_BT = np.zeros(logits_BT.shape, bool)
    for b in range(len(x_BTD)):
        valid = [t for t in range(len(logits_BT[b])) if segments_BT[b][t]]
        if routing == "top_k":
            k = max(1, round(mod.capacity * len(valid)))
            chosen = sorted(valid, key=lambda t: (-logits_BT[b, t], t))[:k]
        else:
            score_BT = predictor_BT if routing == "predictor" else logits_BT
            chosen = [t for t in valid if score_BT[b, t] > 0]
        routed_BT[b, chosen] = True
    return routed_BT, logits_BT, predictor_BT


def numpy_mod(mod, x_BTD, segments_BT, routing="top_k"):
    x_BTD = np.asarray(x_BTD, np.float64)
    routed_BT, logits_BT, _ = numpy_route(mod, x_BTD, segments_BT, routing)
    own = np.asarray(mod.block.own[...], np.float64)
    context = np.asarray(mod.block.context[...], np.float64)
    y_BTD = x_BTD.copy()
    for b in range(len(x_BTD)):
        runs_T, chosen = _runs(segments_BT[b]), np.flatnonzero(routed_BT[b])
        for t in chosen:
            seen = [s for s in chosen if s <= t and runs_T[s] == runs_T[t]]
            mean_D = x_BTD[b, seen].mean(0)
            delta_D = np.tanh(x_BTD[b, t] @ own + mean_D @ context) + 0.1 * np.sin(t)
            y_BTD[b, t] += numpy_gate(mod.gate, logits_BT[b, t]) * delta_D
    return y_BTD


@pytest.mark.quick
@pytest.mark.parametrize(
    ("gate", "routing"),
    [
        ("linear", "top_k"),
        ("sigmoid", "top_k"),
        ("tanh", "top_k"),
        ("linear", "predictor"),
        ("sigmoid", "router"),
    ],
)
def test_equals_eq_1(gate, routing):
    mod, x_BTD = toy(gate=gate), tokens()
    y_BTD, aux = call(mod, x_BTD, segment_ids_BT=SEGMENTS, routing=routing)
    np.testing.assert_allclose(y_BTD, numpy_mod(mod, x_BTD, SEGMENTS, routing), atol=2e-5)
    routed_BT, logits_BT, predictor_BT = numpy_route(mod, x_BTD, SEGMENTS, routing)
    np.testing.assert_array_equal(aux.routed_BT, routed_BT)
    assert 0 < routed_BT.sum() < (SEGMENTS != 0).sum()
    # Padding is not read.
    valid_BT = SEGMENTS != 0
    assert_close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    assert_close(np.asarray(aux.router_logits_BT)[valid_BT], logits_BT[valid_BT])
    assert_close(np.asarray(aux.predictor_logits_BT)[valid_BT], predictor_BT[valid_BT])
    # Skipped tokens and padding are the very same bits.
    np.testing.assert_array_equal(np.asarray(y_BTD)[~routed_BT], np.asarray(x_BTD)[~routed_BT])


@pytest.mark.parametrize(
    ("capacity", "length"),
    [(0.125, length) for length in (1, 2, 7, 8, 9, 255, 256)]
    + [(0.3, 1), (0.3, 9), (0.3, 255), (1.0, 7), (1.0, 256)],
)
def test_any_length_routes_its_share(length, capacity):
    mod, x_BTD = toy(capacity=capacity), tokens(batch=1, length=length)
    y_BTD, aux = call(mod, x_BTD)
    k = min(max(round(capacity * length), 1), length)
    assert aux.routed_BT.sum() == k
    np.testing.assert_allclose(aux.statistics["fraction"], k / length, rtol=1e-6)
    np.testing.assert_allclose(y_BTD, numpy_mod(mod, x_BTD, np.ones((1, length))), atol=2e-5)


# --- Choosing -----------------------------------------------------------------------------------


def test_equal_scores_route_the_first_tokens():
    mod = toy()
    identity_gate(mod)
    _, aux = call(mod, tokens(), segment_ids_BT=SEGMENTS)
    for routed_T, segments_T in zip(aux.routed_BT, SEGMENTS, strict=True):
        valid = np.flatnonzero(segments_T)
        k = max(1, round(0.3 * len(valid)))
        assert np.flatnonzero(routed_T).tolist() == valid[:k].tolist()


@pytest.mark.parametrize("per_document", [False, True])
def test_padding_neither_competes_nor_changes_a_row(per_document):
    mod, x_BTD = toy(per_document=per_document), tokens(batch=4)
    segments_BT = SEGMENTS[[0, 1, 1, 5]]
    y_BTD, aux = call(mod, x_BTD, segment_ids_BT=segments_BT)
    for left, right in ((0, 9), (9, 0), (3, 6)):
        pads = (0, 0), (left, right)
        for value in (0.0, 1e4, np.nan):
            padded_BTD = np.pad(x_BTD, (*pads, (0, 0)), constant_values=value)
            positions_BT = np.broadcast_to(
                np.arange(T + left + right) - left, (4, T + left + right)
            )
            y, padded = call(
                mod,
                padded_BTD,
                segment_ids_BT=np.pad(segments_BT, pads),
                positions_BT=positions_BT,
            )
            inside = slice(left, left + T)
            np.testing.assert_array_equal(padded.routed_BT, np.pad(aux.routed_BT, pads))
            np.testing.assert_allclose(y[:, inside], y_BTD, atol=1e-6)
            np.testing.assert_array_equal(np.delete(y, range(left, left + T), 1), value)
            for name in ("router_loss", "predictor_loss"):
                np.testing.assert_allclose(getattr(padded, name), getattr(aux, name), rtol=1e-5)
            for name, statistic in aux.statistics.items():
                np.testing.assert_allclose(padded.statistics[name], statistic, rtol=1e-4, atol=1e-6)


def test_a_row_of_padding_is_untouched_and_finite():
    x_BTD = tokens(batch=2)
    segments_BT = np.zeros((2, T), np.int32)

    mod = MixtureOfDepths(transformer_block(), D, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(mod)

    def loss(state, x_BTD):
        y_BTD, aux = nnx.merge(graphdef, state)(x_BTD, segment_ids_BT=jnp.asarray(segments_BT))
        return jnp.sum(y_BTD) + aux.router_loss + aux.predictor_loss, (y_BTD, aux)

    run = quick_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (y_BTD, aux)), gradients = run(state, x_BTD)
    np.testing.assert_array_equal(y_BTD, x_BTD)
    assert not np.any(aux.routed_BT)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((aux, gradients)))


def test_random_routing_is_seeded_and_fills_the_same_slots():
    mod, x_BTD = toy(), tokens()
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    runs = [call(mod, x_BTD, segment_ids_BT=SEGMENTS, routing="random", key=key) for key in keys]
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    assert not np.array_equal(runs[0][1].routed_BT, runs[2][1].routed_BT)
    top_k_BT = call(mod, x_BTD, segment_ids_BT=SEGMENTS)[1].routed_BT
    for _, aux in runs:
        assert aux.routed_BT.sum(1).tolist() == top_k_BT.sum(1).tolist()
        assert not np.any(np.asarray(aux.routed_BT) & (SEGMENTS == 0))
    # Rows draw apart from each other.
    _, aux = call(mod, x_BTD, segment_ids_BT=np.ones_like(SEGMENTS), routing="random", key=keys[0])
    assert len({tuple(row) for row in np.asarray(aux.routed_BT).tolist()}) > B // 2


def test_random_routing_chooses_without_the_router_but_gates_with_it():
    mod, x_BTD, key = toy(), tokens(), jax.random.key(3)
    run = functools.partial(call, segment_ids_BT=SEGMENTS, routing="random", key=key)
    y_BTD, aux = run(mod, x_BTD)
    mod.router.kernel[...] = -2 * mod.router.kernel[...]
    moved_BTD, moved = run(mod, x_BTD)
    np.testing.assert_array_equal(aux.routed_BT, moved.routed_BT)
    np.testing.assert_allclose(moved_BTD - x_BTD, -2 * (y_BTD - x_BTD), atol=1e-5)


def test_noise_moves_the_choice_and_never_the_gate():
    quiet, noisy = toy(), toy(noise=3.0)
    x_BTD, key = tokens(), jax.random.key(4)
    first, again, other, none = (
        call(noisy, x_BTD, key=k) for k in (key, key, jax.random.key(5), None)
    )
    without = call(quiet, x_BTD, key=key)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(none[0], without[0])
    assert not np.array_equal(first[1].routed_BT, other[1].routed_BT)
    assert not np.array_equal(first[1].routed_BT, without[1].routed_BT)
    np.testing.assert_array_equal(first[1].router_logits_BT, without[1].router_logits_BT)
    # Where both routed a first token of the row, its update is the same: no other is in its mean.
    starts_BT = np.cumsum(first[1].routed_BT, 1) + np.cumsum(without[1].routed_BT, 1)
    alone_BT = np.asarray(first[1].routed_BT & without[1].routed_BT) & (starts_BT == 2)
    assert alone_BT.any()
    np.testing.assert_allclose(
        np.asarray(first[0])[alone_BT], np.asarray(without[0])[alone_BT], atol=1e-6
    )


def test_causal_routing_ignores_noise_and_key():
    mod, x_BTD = toy(noise=3.0), tokens()
    for routing in ("predictor", "router"):
        with_key, without = (
            call(mod, x_BTD, routing=routing, key=k) for k in (jax.random.key(0), None)
        )
        np.testing.assert_array_equal(with_key[0], without[0])


def test_each_document_chooses_its_own():
    mod = toy(per_document=True)
    x_BTD = tokens()
    _, aux = call(mod, x_BTD, segment_ids_BT=SEGMENTS)
    logits_BT = np.asarray(aux.router_logits_BT)
    runs_BT = np.asarray(document_runs(jnp.asarray(SEGMENTS)))
    for b in range(B):
        left = max(1, round(0.3 * T))
        for run in range(1, runs_BT[b].max() + 1):
            where = np.flatnonzero(runs_BT[b] == run)
            k = min(max(1, round(0.3 * len(where))), left)
            best = where[np.argsort(-logits_BT[b, where], kind="stable")[:k]]
            routed = where[np.asarray(aux.routed_BT)[b, where]]
            assert sorted(best) == routed.tolist()
            left -= k
    # The row's own choice would have been another.
    _, row_aux = call(toy(), x_BTD, segment_ids_BT=SEGMENTS)
    assert not np.array_equal(row_aux.routed_BT, aux.routed_BT)


def test_a_document_chosen_for_itself_comes_out_as_alone():
    mod, x_BTD = toy(per_document=True), tokens(batch=1)
    y_BTD, aux = call(mod, x_BTD, segment_ids_BT=np.asarray([[1] * 5 + [2] * 7]))
    alone_BTD, alone = call(mod, x_BTD[:, 5:], positions_BT=np.arange(5, 12)[None])
    np.testing.assert_array_equal(aux.routed_BT[:, 5:], alone.routed_BT)
    np.testing.assert_allclose(y_BTD[:, 5:], alone_BTD, atol=1e-6)


def test_all_and_no_tokens():
    mod, x_BTD = toy(gate="sigmoid"), tokens()
    y_BTD = {}
    for bias in (-100.0, 100.0):
        mod.predictor.score.bias[...] = jnp.full(1, bias)
        y_BTD[bias], aux = call(mod, x_BTD, routing="predictor")
        assert np.asarray(aux.routed_BT).all() == (bias > 0)
        assert np.asarray(aux.routed_BT).any() == (bias > 0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(aux))
    np.testing.assert_array_equal(y_BTD[-100.0], x_BTD)
    full, _ = call(toy(gate="sigmoid", capacity=1.0), x_BTD)
    np.testing.assert_allclose(y_BTD[100.0], full, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0.0}, "0.0"),
        ({"capacity": 1.5}, "1.5"),
        ({"capacity": float("nan")}, "nan"),
        ({"gate": "softmax"}, "softmax"),
        ({"gate_on": "attention"}, "attention"),
        ({"noise": -1.0}, "-1.0"),
        ({"noise": float("nan")}, "nan"),
        ({"predictor_width": 0}, "0"),
    ],
)
def test_refuses_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        toy(**options)


def test_refuses_a_routing_it_cannot_do():
    with pytest.raises(ValueError, match="best"):
        toy()(tokens(), routing="best")
    with pytest.raises(ValueError, match="key"):
        toy()(tokens(), routing="random")
    with pytest.raises(ValueError, match="predictor"):
        toy(predictor=False)(tokens(), routing="predictor")


def test_refuses_arrays_that_do_not_fit():
    x_BTD = tokens()
    for bad in (x_BTD[:, :0], x_BTD[0]):
        with pytest.raises(ValueError, match=r"\[B, T, D\]"):
            toy()(bad)
    for name in ("segment_ids_BT", "positions_BT"):
        for ids in (jnp.ones((1, T), jnp.int32), jnp.ones(x_BTD.shape[:2])):
            with pytest.raises(ValueError, match=name):
                toy()(x_BTD, **{name: ids})
    mod = MixtureOfDepths(lambda x, **_: x[..., :1], D, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"{D}\), got .* 1\)"):
        mod(x_BTD)


def test_rubbish_in_padding_reaches_no_gradient():
    x_BTD, segments = tokens(), jnp.asarray(SEGMENTS)
    padding = (segments == 0)[..., None]
    graphdef, state = nnx.split(toy(capacity=0.5))

    @quick_jit
    def gradients(state, x_BTD):
        def loss(state, x_BTD):
            y_BTD, aux = nnx.merge(graphdef, state)(x_BTD, segment_ids_BT=segments)
            total = jnp.sum(jnp.where(padding, 0, y_BTD) ** 2)
            return total + aux.router_loss + aux.predictor_loss

        return jax.grad(loss, (0, 1))(state, x_BTD)

    expected = gradients(state, jnp.where(padding, 0, x_BTD))
    for rubbish in (jnp.nan, jnp.inf):
        actual = gradients(state, jnp.where(padding, rubbish, x_BTD))
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, e)


# --- What the block sees -------------------------------------------------------------------------


def _watch(positions_BT, segments_BT, routing="top_k", **options):
    """(positions, segment ids, x) as the block got them, and aux."""
    seen = []

    def block(x_BCD, *, positions_BC, segment_ids_BC):
        seen.append((positions_BC, segment_ids_BC, x_BCD))
        return jnp.zeros_like(x_BCD)

    mod = MixtureOfDepths(block, D, rngs=nnx.Rngs(0), **{"capacity": 0.5, **options})
    x_BTD = tokens(batch=len(segments_BT), length=len(segments_BT[0]))
    y_BTD, aux = mod(
        x_BTD,
        positions_BT=None if positions_BT is None else jnp.asarray(positions_BT),
        segment_ids_BT=jnp.asarray(segments_BT),
        routing=routing,
    )
    np.testing.assert_array_equal(y_BTD, x_BTD)  # a zero update leaves the input exactly
    return (*(np.asarray(x) for x in seen[0]), aux, np.asarray(x_BTD))


@pytest.mark.quick
@pytest.mark.parametrize("routing", ["top_k", "router"])
def test_positions_are_the_true_ones_and_ascend(routing):
    positions_BT = np.broadcast_to(1000 + 3 * np.arange(T), (B, T))
    positions_BC, segments_BC, x_BCD, aux, x_BTD = _watch(positions_BT, SEGMENTS, routing)
    for b, routed_T in enumerate(np.asarray(aux.routed_BT)):
        at = np.flatnonzero(routed_T)
        n = len(at)
        assert positions_BC[b, :n].tolist() == (1000 + 3 * at).tolist()
        assert (np.diff(positions_BC[b, :n]) > 0).all()
        np.testing.assert_array_equal(x_BCD[b, :n], x_BTD[b, at])
        assert segments_BC[b, :n].tolist() == np.asarray(_runs(SEGMENTS[b]))[at].tolist()
        assert (segments_BC[b, :n] > 0).all()
        assert (segments_BC[b, n:] == 0).all() and (x_BCD[b, n:] == 0).all()


def test_documents_stay_apart_when_the_one_between_is_skipped():
    segments_BT = np.asarray([[1, 1, 2, 2, 1, 1]])
    mod = toy(capacity=0.67)
    # Score by one coordinate, and make it low in the middle.
    mod.router.kernel[...] = jnp.zeros((D, 1)).at[0].set(1.0)
    x_BTD = tokens(batch=1, length=6)
    x_BTD = x_BTD.at[0, :, 0].set(jnp.asarray([3.0, 4.0, -5.0, -6.0, 5.0, 2.0]))
    y_BTD, aux = call(mod, x_BTD, segment_ids_BT=segments_BT)
    assert aux.routed_BT[0].tolist() == [True, True, False, False, True, True]
    # The last tokens' mean is over themselves alone.
    np.testing.assert_allclose(y_BTD, numpy_mod(mod, x_BTD, segments_BT), atol=2e-5)
    later_BTD, _ = call(mod, x_BTD.at[:, :2, 1:].add(1.0), segment_ids_BT=segments_BT)
    np.testing.assert_array_equal(later_BTD[:, 2:], y_BTD[:, 2:])


@pytest.mark.quick
@pytest.mark.parametrize("routing", ["top_k", "predictor"])
def test_routed_attention_is_full_attention_without_the_unrouted_keys(routing):
    attention = Attention(D, num_heads=4, num_kv_heads=2, qk_norm=True, rngs=nnx.Rngs(1))
    mod = MixtureOfDepths(AttentionBlock(attention), D, capacity=0.5, gate="tanh", rngs=nnx.Rngs(0))
    mod.predictor.score.kernel[...] = jax.random.normal(jax.random.key(0), (16, 1))
    x_BTD = tokens()
    positions_BT = jnp.broadcast_to(7 + jnp.arange(T), (B, T))
    # Scores that choose, and a gate of 1 up to rounding.
    mod.router.kernel[...] = 1e-6 * jax.random.normal(jax.random.key(2), (D, 1))
    y_BTD, aux = call(
        mod, x_BTD, positions_BT=positions_BT, segment_ids_BT=SEGMENTS, routing=routing
    )

    @quick_jit
    def masked(x_BTD, routed_BT):
        q_BTNH, k_BTKH = attention.queries_and_keys(x_BTD, positions_BT)
        v_BTKH = attention.value(x_BTD).reshape(k_BTKH.shape)
        runs_BT = document_runs(jnp.asarray(SEGMENTS))
        mask_BTT = (runs_BT[:, :, None] == runs_BT[:, None]) & routed_BT[:, None]
        mask_BTT &= jnp.tril(jnp.ones((T, T), bool))
        scores = jnp.einsum("btkgh,bskh->bkgts", q_BTNH.reshape(B, T, 2, 2, 4), k_BTKH) / 2
        weights = jax.nn.softmax(jnp.where(mask_BTT[:, None, None], scores, -1e30), axis=-1)
        return attention.out(jnp.einsum("bkgts,bskh->btkgh", weights, v_BTKH).reshape(B, T, D))

    routed_BT = np.asarray(aux.routed_BT)
    assert 0 < routed_BT.sum() < (SEGMENTS != 0).sum()
    expected_BTD = np.asarray(masked(x_BTD, aux.routed_BT))
    np.testing.assert_allclose(
        np.asarray(y_BTD - x_BTD)[routed_BT], expected_BTD[routed_BT], rtol=1e-4, atol=1e-5
    )


class AttentionBlock(nnx.Module):
    def __init__(self, attention):
        self.attention = attention

    def __call__(self, x_BCD, *, positions_BC, segment_ids_BC):
        return self.attention(x_BCD, positions_BT=positions_BC, segment_ids_BT=segment_ids_BC)


# --- Gates and residuals -------------------------------------------------------------------------


@pytest.mark.quick
def test_gate_formulas():
    r = np.linspace(-40, 40, 33)
    for gate in ("linear", "sigmoid", "tanh"):
        out = apply_gate(gate, jnp.asarray(r, jnp.bfloat16))
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(apply_gate(gate, jnp.asarray(r)), numpy_gate(gate, r), rtol=1e-5)
    assert apply_gate("tanh", jnp.zeros(())) == 1.0


@pytest.mark.parametrize("block_size", [None, 4])
def test_capacity_one_is_the_dense_block(block_size):
    block, x_BTD = transformer_block(block_size=block_size), tokens()
    runs_BT = document_runs(jnp.asarray(SEGMENTS))
    positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    run_block = quick_jit(lambda x: block(x, positions_BC=positions_BT, segment_ids_BC=runs_BT))
    delta_BTD = run_block(x_BTD)
    real_BT = SEGMENTS != 0

    identity = MixtureOfDepths(block, D, capacity=1.0, gate="tanh", rngs=nnx.Rngs(0))
    identity_gate(identity)
    y_BTD, _ = call(identity, x_BTD, segment_ids_BT=SEGMENTS)
    dense_BTD = np.asarray(x_BTD + delta_BTD)
    whole = [0, 1]  # rows without padding hold the same numbers in the same places
    np.testing.assert_array_equal(np.asarray(y_BTD)[whole], dense_BTD[whole])
    np.testing.assert_allclose(np.asarray(y_BTD)[real_BT], dense_BTD[real_BT], atol=1e-6)

    linear = MixtureOfDepths(block, D, capacity=1.0, rngs=nnx.Rngs(0))
    y_BTD, aux = call(linear, x_BTD, segment_ids_BT=SEGMENTS)
    expected_BTD = np.asarray(x_BTD + aux.router_logits_BT[..., None] * delta_BTD)
    np.testing.assert_allclose(np.asarray(y_BTD)[real_BT], expected_BTD[real_BT], atol=1e-5)


def test_gate_on_the_mlp_alone():
    block, x_BTD = transformer_block(), tokens()
    mod = MixtureOfDepths(block, D, capacity=1.0, gate="sigmoid", gate_on="mlp", rngs=nnx.Rngs(0))
    y_BTD, aux = call(mod, x_BTD)

    @quick_jit
    def by_hand(x_BTD, gate_BT):
        positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        attended_BTD = block.attention(block.attention_norm(x_BTD), positions_BT=positions_BT)
        mlp_BTD = block.mlp(block.mlp_norm(x_BTD + attended_BTD))
        return x_BTD + attended_BTD + gate_BT[..., None] * mlp_BTD

    gate_BT = numpy_gate("sigmoid", np.asarray(aux.router_logits_BT))
    np.testing.assert_allclose(y_BTD, by_hand(x_BTD, gate_BT), atol=1e-5)
    mod.gate_on = "block"
    assert not np.allclose(y_BTD, call(mod, x_BTD)[0], atol=1e-2)


@pytest.mark.quick
def test_skipped_tokens_keep_their_bits():
    mod, x_BTD = toy(), np.array(tokens())
    x_BTD[:, ::2, :8] = -0.0
    x_BTD[:, ::3, 8:] = np.float32(-1e-41)
    pads_BT = SEGMENTS == 0
    x_BTD[pads_BT] = np.uint32(0xFFC12345).view(np.float32)  # a NaN with a payload
    y_BTD, aux = call(mod, x_BTD, segment_ids_BT=SEGMENTS)
    skipped_BT = ~np.asarray(aux.routed_BT)
    bits = np.asarray(y_BTD)[skipped_BT].view(np.uint32), x_BTD[skipped_BT].view(np.uint32)
    np.testing.assert_array_equal(*bits)
    real_BT = np.asarray(aux.routed_BT)
    assert np.isfinite(np.asarray(y_BTD)[real_BT]).all()


# --- Losses and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["top_k", "predictor", "router", "random"])
def test_auxiliary_losses_and_statistics(routing):
    mod, x_BTD = toy(), tokens()
    _, aux = call(mod, x_BTD, segment_ids_BT=SEGMENTS, routing=routing, key=jax.random.key(0))
    valid_BT, routed = SEGMENTS != 0, np.asarray(aux.routed_BT)
    routed, logits = routed[valid_BT], np.asarray(aux.router_logits_BT, np.float64)[valid_BT]
    predictor = np.asarray(aux.predictor_logits_BT, np.float64)[valid_BT]

    def nats(score):
        p = 1 / (1 + np.exp(-score))
        return -np.where(routed, np.log(p), np.log1p(-p)).mean()

    np.testing.assert_allclose(aux.router_loss, nats(logits), rtol=1e-5)
    np.testing.assert_allclose(aux.predictor_loss, nats(predictor), rtol=1e-5)
    p = 1 / (1 + np.exp(-logits))
    expected = {
        "fraction": routed.mean(),
        "logit_mean": logits.mean(),
        "logit_std": logits.std(),
        "above_half": (p > 0.5).mean(),
        "entropy": -(p * np.log(p) + (1 - p) * np.log1p(-p)).mean(),
    }
    if routing in ("top_k", "random"):
        says = predictor > 0
        assert says.any() and not says.all()
        expected |= {
            "predictor_accuracy": (says == routed).mean(),
            "predictor_precision": routed[says].mean(),
            "predictor_recall": says[routed].mean(),
        }
    assert set(aux.statistics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(aux.statistics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_collapse_shows_in_the_statistics():
    mod, x_BTD = toy(predictor=False), tokens()
    mod.router.kernel[...] = 1e4 * jnp.ones((D, 1))
    _, aux = call(mod, jnp.abs(x_BTD))
    assert aux.statistics["above_half"] == 1 and aux.statistics["entropy"] < 1e-6
    identity_gate(mod)
    _, aux = call(mod, x_BTD)
    np.testing.assert_allclose(aux.statistics["entropy"], np.log(2), rtol=1e-6)
    assert aux.statistics["above_half"] == 0


@functools.partial(quick_jit, static_argnames=("graphdef", "weights", "routing"))
def _gradients(graphdef, state, x_BTD, weights, routing="top_k"):
    """Of weights[0] * a loss of y + weights[1] * router_loss + weights[2] * predictor_loss."""

    def loss(state, x_BTD):
        y_BTD, aux = nnx.merge(graphdef, state)(
            x_BTD, segment_ids_BT=jnp.asarray(SEGMENTS), routing=routing
        )
        terms = jnp.sum(jnp.sin(3 * y_BTD)) / y_BTD.size, aux.router_loss, aux.predictor_loss
        return sum(w * t for w, t in zip(weights, terms, strict=True) if w), y_BTD

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(state, x_BTD)


def gradients(mod, x_BTD, *weights, routing="top_k"):
    """((loss, y_BTD), {module: gradient leaves}); "x" is the input's."""
    value, (params, x_grad_BTD) = _gradients(*nnx.split(mod), x_BTD, weights, routing)
    leaves = {name: [np.asarray(g) for g in jax.tree.leaves(params[name])] for name in params}
    return value, leaves | {"x": [np.asarray(x_grad_BTD)]}


def _zero(leaves) -> bool:
    return all((leaf == 0).all() for leaf in leaves)


@pytest.mark.quick
def test_which_loss_reaches_what():
    mod, x_BTD = toy(), tokens()
    _, model = gradients(mod, x_BTD, 1.0, 0.0, 0.0)
    assert _zero(model["predictor"])
    assert not any(_zero(model[name]) for name in ("router", "block", "x"))
    _, router = gradients(mod, x_BTD, 0.0, 1.0, 0.0)
    assert not _zero(router["router"]) and _zero(router["block"]) and _zero(router["predictor"])
    _, predictor = gradients(mod, x_BTD, 0.0, 0.0, 1.0)
    assert all(np.any(leaf) for leaf in predictor["predictor"])
    assert all(_zero(predictor[name]) for name in ("router", "block", "x"))


@pytest.mark.quick
def test_a_predictor_changes_nothing_else():
    x_BTD = tokens()
    (_, with_BTD), with_predictor = gradients(toy(), x_BTD, 1.0, 0.3, 0.1)
    (_, without_BTD), without = gradients(toy(predictor=False), x_BTD, 1.0, 0.3, 0.0)
    np.testing.assert_array_equal(with_BTD, without_BTD)
    for name in ("router", "block", "x"):
        for a, b in zip(with_predictor[name], without[name], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("gate", ["linear", "sigmoid", "tanh"])
def test_router_gradient_equals_finite_differences(gate):
    mod, x_BTD = toy(gate=gate, predictor=False), tokens()
    (_, _), exact = gradients(mod, x_BTD, 1.0, 0.0, 0.0)
    kernel_D1 = np.asarray(mod.router.kernel[...], np.float64)

    def loss(kernel_D1):
        mod.router.kernel[...] = jnp.asarray(kernel_D1, jnp.float32)
        return np.sin(3 * numpy_mod_of(mod, x_BTD, kernel_D1)).mean()

    numeric_D1 = np.zeros_like(kernel_D1)
    for d in range(D):
        step_D1 = np.zeros_like(kernel_D1)
        step_D1[d] = 1e-6
        up, down = kernel_D1 + step_D1, kernel_D1 - step_D1
        numeric_D1[d] = (loss(up) - loss(down)) / 2e-6
    np.testing.assert_allclose(exact["router"][0], numeric_D1, rtol=1e-3, atol=1e-6)
    assert np.abs(numeric_D1).max() > 1e-3


class _Exact:
    """A module's stand-in with a float64 router, for numpy_mod."""

    def __init__(self, mod, kernel_D1):
        self.capacity, self.gate, self.block, self.predictor = (
            mod.capacity, mod.gate, mod.block, None,
        )  # fmt: skip
        self.router = type("Router", (), {"kernel": {...: kernel_D1}})


def numpy_mod_of(mod, x_BTD, kernel_D1):
    return numpy_mod(_Exact(mod, kernel_D1), x_BTD, SEGMENTS)


# --- Causality -----------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(("routing", "block_size"), [("predictor", None), ("router", 3)])
def test_causal_routing_does_not_look_ahead(routing, block_size):
    mod = MixtureOfDepths(transformer_block(block_size=block_size), D, rngs=nnx.Rngs(0))
    mod.predictor.score.kernel[...] = jax.random.normal(jax.random.key(0), (16, 1))
    mod.predictor.score.bias[...] = jnp.zeros(1)
    x_BTD = tokens(batch=1)
    # The same row, each time with all that follows token j made anew.
    j_B = np.arange(T)
    rows_BTD = np.where(
        (np.arange(T) >= j_B[:, None])[..., None], 3 * tokens(9, batch=T), np.asarray(x_BTD)
    )
    y_BTD, aux = call(mod, rows_BTD, routing=routing)
    whole_BTD, whole = call(mod, jnp.repeat(x_BTD, T, 0), routing=routing)
    assert 0 < whole.routed_BT[0].sum() < T
    for j in j_B:
        np.testing.assert_array_equal(aux.routed_BT[j, :j], whole.routed_BT[0, :j])
        np.testing.assert_array_equal(y_BTD[j, :j], whole_BTD[0, :j])


def _influence(mod, x_1TD, routing):
    """|d y_t / d x_j|, [T, T]."""

    def out_TD(x_1TD):
        y_BTD, _ = mod(x_1TD, routing=routing)
        return y_BTD[0]

    jacobian = quick_jit(jax.jacrev(out_TD))(x_1TD)[:, :, 0]
    return np.abs(np.asarray(jacobian)).sum(axis=(1, 3))


@pytest.mark.parametrize("routing", ["top_k", "predictor", "router"])
def test_gradients_never_come_from_later_tokens(routing):
    # The choice itself has no gradient, so for top_k this is the case of a frozen selection.
    mod, x_1TD = toy(capacity=0.5), tokens(batch=1, length=8)
    influence_TT = _influence(mod, x_1TD, routing)
    np.testing.assert_array_equal(np.triu(influence_TT, 1), 0)
    routed_T = np.asarray(call(mod, x_1TD, routing=routing)[1].routed_BT[0])
    expected_TT = np.tril(routed_T[:, None] & routed_T) | np.eye(8, dtype=bool)
    np.testing.assert_array_equal(influence_TT > 0, expected_TT)


def test_top_k_with_its_selection_frozen_is_causal():
    mod, x_BTD = toy(), tokens(batch=1)
    y_BTD, aux = call(mod, x_BTD)
    routed_T = np.asarray(aux.routed_BT[0])
    for j in range(1, T):
        moved_BTD = np.array(x_BTD)
        # Perturb across the router's kernel, so that every logit and the choice stay.
        kernel_D = np.asarray(mod.router.kernel[...])[:, 0]
        noise_TD = np.asarray(tokens(8, batch=1))[0]
        noise_TD = noise_TD - np.outer(noise_TD @ kernel_D, kernel_D) / (kernel_D @ kernel_D)
        moved_BTD[0, j:] += noise_TD[j:]
        y, moved = call(mod, moved_BTD)
        np.testing.assert_array_equal(moved.routed_BT[0], routed_T)
        np.testing.assert_array_equal(y[0, :j], y_BTD[0, :j])
        assert not np.array_equal(y[0, j], y_BTD[0, j])


@pytest.mark.parametrize("block_size", [None, 2])
def test_packed_documents_do_not_meet(block_size):
    mod = MixtureOfDepths(
        transformer_block(block_size=block_size), D, gate="sigmoid", rngs=nnx.Rngs(0)
    )
    x_BTD = tokens(batch=1)
    packed = jnp.concatenate([x_BTD[:, :5], x_BTD[:, 5:]], axis=1)
    y_BTD, aux = call(mod, packed, segment_ids_BT=np.asarray([[1] * 5 + [2] * 7]), routing="router")
    alone_BTD, alone = call(
        mod, x_BTD[:, 5:], positions_BT=np.arange(5, 12)[None], routing="router"
    )
    np.testing.assert_array_equal(aux.routed_BT[:, 5:], alone.routed_BT)
    assert alone.routed_BT.any()
    np.testing.assert_allclose(y_BTD[:, 5:], alone_BTD, atol=1e-6)


# --- Precision -----------------------------------------------------------------------------------


def test_bfloat16_and_huge_scores_stay_finite():
    mod = MixtureOfDepths(transformer_block(), D, capacity=0.5, rngs=nnx.Rngs(0))
    mod.router.kernel[...] = 1e3 * mod.router.kernel[...]
    x_BTD = tokens(dtype=jnp.bfloat16)
    (_, y_BTD), leaves = gradients(mod, x_BTD, 1.0, 1.0, 1.0)
    assert y_BTD.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(y_BTD, np.float32)).all()
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in sum(leaves.values(), []))
    y_BTD, aux = call(mod, x_BTD, segment_ids_BT=SEGMENTS, routing="router")
    assert np.isfinite(np.asarray(y_BTD, np.float32)).all()
    assert np.abs(np.asarray(aux.router_logits_BT)).max() > 1e3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(aux))
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(aux)}
    assert dtypes == {np.dtype(bool), np.dtype(np.float32)}


def test_the_choice_is_the_same_in_either_precision():
    x_BTD = tokens(dtype=jnp.bfloat16)
    mod = toy()
    for routing in ("top_k", "predictor"):
        half = call(mod, x_BTD, routing=routing)[1]
        full = call(mod, x_BTD.astype(jnp.float32), routing=routing)[1]
        np.testing.assert_array_equal(half.routed_BT, full.routed_BT)
        np.testing.assert_array_equal(half.router_logits_BT, full.router_logits_BT)


def test_close_scores_are_told_apart_in_float32():
    # These logits are one and the same in bfloat16.
    mod, x_BTD = toy(), jnp.zeros((1, 8, D)).at[0, :, 0].set(1 + 1e-4 * jnp.arange(8))
    mod.router.kernel[...] = jnp.zeros((D, 1)).at[0].set(1.0)
    _, aux = call(mod, x_BTD)
    assert np.flatnonzero(aux.routed_BT[0]).tolist() == [6, 7]


# --- In other people's models --------------------------------------------------------------------


def test_in_a_linen_model():
    linen = nnx.bridge.to_linen(
        lambda *, rngs: MixtureOfDepths(transformer_block(), D, capacity=0.5, rngs=rngs)
    )
    x_BTD = tokens(batch=2)
    variables = jax.jit(linen.init)(jax.random.key(0), x_BTD)
    y_BTD, aux = jax.jit(linen.apply)(variables, x_BTD)
    assert aux.routed_BT.sum(1).tolist() == [6, 6]
    changed_BT = np.any(np.asarray(y_BTD != x_BTD), axis=-1)
    np.testing.assert_array_equal(changed_BT, aux.routed_BT)
