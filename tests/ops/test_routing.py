import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modo.ops import Route, combine, dispatch, document_runs, route_top_k, route_where
from modo.ops.routing import best_of_each_document, capacity_slots, membership_loss, row_slots

top_k = jax.jit(route_top_k, static_argnames="k")
where = jax.jit(route_where)
gather = jax.jit(dispatch)
add = jax.jit(combine)
best_of_documents = jax.jit(best_of_each_document, static_argnames="capacity")


def best_positions(scores, k: int, allowed) -> list[int]:
    """The k best allowed positions, ties to the lowest, NaN last: one row, ascending."""
    keys = [(-np.inf if np.isnan(s) else float(s)) for s in np.asarray(scores, np.float64)]
    order = sorted((t for t in range(len(keys)) if allowed[t]), key=lambda t: (-keys[t], t))
    return sorted(order[:k])


def check_route(route: Route, logits_BT, expected: list[list[int]]) -> None:
    """Every field of a Route against the positions that each row should take."""
    logits_BT = np.asarray(logits_BT).astype(np.float32)
    length, slots = logits_BT.shape[1], route.index_BC.shape[1]
    assert route.index_BC.dtype == jnp.int32 and route.weight_BC.dtype == jnp.float32
    for b, positions in enumerate(expected):
        n = len(positions)
        assert np.asarray(route.index_BC)[b].tolist() == positions + [length - 1] * (slots - n)
        assert np.asarray(route.filled_BC)[b].tolist() == [True] * n + [False] * (slots - n)
        assert np.flatnonzero(np.asarray(route.mask_BT)[b]).tolist() == positions
        np.testing.assert_array_equal(route.weight_BC[b, :n], logits_BT[b, positions])
        np.testing.assert_array_equal(route.weight_BC[b, n:], 0.0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (0.125, {1: 1, 2: 1, 7: 1, 8: 1, 9: 1, 255: 32, 256: 32}),
        (0.3, {1: 1, 2: 1, 7: 2, 8: 2, 9: 3, 255: 76, 256: 77}),
        (1.0, {1: 1, 2: 2, 7: 7, 8: 8, 9: 9, 255: 255, 256: 256}),
        (1e-9, {1: 1, 7: 1, 256: 1}),
    ],
)
def test_capacity_is_a_fraction_of_any_length(capacity, expected):
    assert {length: capacity_slots(capacity, length) for length in expected} == expected


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 255, 256])
@pytest.mark.parametrize("capacity", [0.125, 0.3, 1.0])
def test_takes_k_of_any_length(length, capacity):
    k = min(max(round(capacity * length), 1), length)
    logits_BT = np.random.default_rng(length).normal(size=(2, length)).astype(np.float32)
    route = top_k(logits_BT, capacity_slots(capacity, length))
    check_route(route, logits_BT, [best_positions(row, k, [True] * length) for row in logits_BT])


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_equal_scores_take_exactly_k_lowest_first(k, dtype):
    T = 16
    rng = np.random.default_rng(0)
    logits_BT = jnp.asarray(
        np.stack(
            [
                np.zeros(T),
                np.full(T, -3.0),
                rng.integers(0, 3, T),
                np.where(rng.random(T) < 0.5, -0.0, 0.0),
                1 + 1e-4 * rng.normal(size=T),  # all but equal, and equal in bfloat16
                np.full(T, -np.inf),
                np.full(T, np.nan),
                np.where(rng.random(T) < 0.5, np.inf, -np.inf),
            ]
        ),
        dtype,
    )
    expected = [
        best_positions(row, k, [True] * T) for row in np.asarray(logits_BT.astype(jnp.float32))
    ]
    assert expected[0] == list(range(k)) and expected[3] == list(range(k))
    check_route(top_k(logits_BT, k), logits_BT.astype(jnp.float32), expected)


def test_own_number_and_valid_tokens_of_each_row():
    B, T, k = 32, 12, 7
    rng = np.random.default_rng(1)
    logits_BT = rng.integers(-2, 3, (B, T)).astype(np.float32)  # many ties
    logits_BT[0], logits_BT[1, ::2] = -np.inf, np.nan
    k_B = rng.integers(0, k + 1, B).astype(np.int32)
    valid_BT = rng.random((B, T)) < 0.6
    valid_BT[2], valid_BT[3] = False, True
    route = top_k(logits_BT, k, k_B=k_B, valid_BT=valid_BT)
    expected = [best_positions(logits_BT[b], k_B[b], valid_BT[b]) for b in range(B)]
    assert 0 in map(len, expected) and any(len(e) < n for e, n in zip(expected, k_B, strict=True))
    check_route(route, logits_BT, expected)


@pytest.mark.quick
def test_a_valid_token_beats_an_invalid_one_whatever_the_logits():
    logits_BT = jnp.asarray([[np.inf, -np.inf, 1e38, np.nan, 3.0]])
    valid_BT = jnp.asarray([[False, True, False, True, False]])
    check_route(top_k(logits_BT, 3, valid_BT=valid_BT), logits_BT, [[1, 3]])


@pytest.mark.parametrize("k", [0, -1, 9])
def test_refuses_an_impossible_k(k):
    with pytest.raises(ValueError, match=rf"k {k} and T 8"):
        route_top_k(jnp.zeros((1, 8)), k)


def test_gradient_reaches_the_logits_through_the_weights_alone():
    logits_BT = jnp.asarray([[0.3, 2.0, -1.0, 1.0], [4.0, 0.0, 5.0, 0.0]])
    scale_BC = jnp.asarray([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]])
    k_B = jnp.asarray([3, 2])
    gradient_BT = jax.jit(
        jax.grad(lambda l_BT: jnp.sum(route_top_k(l_BT, 3, k_B=k_B).weight_BC * scale_BC))
    )(logits_BT)
    np.testing.assert_array_equal(gradient_BT, [[2, 3, 0, 5], [7, 0, 11, 0]])


def test_bfloat16_logits_are_compared_as_float32():
    logits_BT = jax.random.normal(jax.random.key(0), (4, 32), jnp.bfloat16)
    for a, b in zip(
        jax.tree.leaves(top_k(logits_BT, 9)),
        jax.tree.leaves(top_k(logits_BT.astype(jnp.float32), 9)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quick
def test_slots_of_a_row_count_its_valid_tokens_alone():
    T, capacity = 40, 0.3
    sizes = np.asarray([0, 1, 2, 5, 7, 39, 40])
    valid_BT = np.arange(T) < sizes[:, None]
    expected = [max(1, round(capacity * n)) for n in sizes]
    assert row_slots(capacity, valid_BT).tolist() == expected
    shuffled_BT = np.random.default_rng(0).permuted(valid_BT, axis=1)
    assert row_slots(capacity, shuffled_BT).tolist() == expected
    longer_BT = np.pad(valid_BT, ((0, 0), (3, 21)))
    assert row_slots(capacity, longer_BT).tolist() == expected
    assert max(expected) <= capacity_slots(capacity, T)


@pytest.mark.quick
def test_where_takes_every_marked_token():
    rng = np.random.default_rng(2)
    mask_BT = rng.random((5, 9)) < 0.5
    mask_BT[0], mask_BT[1] = False, True
    logits_BT = rng.normal(size=mask_BT.shape).astype(np.float32)
    check_route(where(mask_BT, logits_BT), logits_BT, [np.flatnonzero(m).tolist() for m in mask_BT])


def _odd_values(rng, shape, dtype):
    """Values whose bits are easily lost, and the integer type of their bits."""
    bits = {jnp.float32: np.uint32, jnp.bfloat16: np.uint16}[dtype]
    x = rng.integers(0, np.iinfo(bits).max, shape, dtype=bits, endpoint=True)
    sign = np.array(1 << (np.iinfo(bits).bits - 1), bits)
    nan = np.asarray(jnp.asarray(np.nan, dtype)).view(bits)
    # XLA's CPU backend computes bfloat16 in float32, and on the way back every NaN is a plain one.
    if dtype == jnp.bfloat16:
        x = np.where(np.isnan(x.view(np.dtype(dtype))), x & sign | nan, x)
    x[..., 0] = sign  # -0.0
    x[..., 1] = sign | 1  # negative subnormal
    x[..., 2] = nan if dtype == jnp.bfloat16 else nan | 5
    x[..., 3] = sign | nan
    return x.view(np.dtype(dtype)), bits


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_skipped_tokens_come_back_bitwise(dtype):
    x_BTD, bits = _odd_values(np.random.default_rng(3), (3, 9, 6), dtype)
    logits_BT = np.random.default_rng(4).normal(size=(3, 9)).astype(np.float32)
    route = top_k(logits_BT, 4, k_B=np.asarray([4, 2, 0]))
    # What a block makes of an empty slot must not matter.
    delta_BCD = jnp.where(route.filled_BC[..., None], 1.0, jnp.nan) * jnp.ones(6)
    y_BTD = np.asarray(add(x_BTD, delta_BCD, route))
    assert y_BTD.dtype == x_BTD.dtype
    mask_BT = np.asarray(route.mask_BT)
    assert mask_BT.sum(axis=1).tolist() == [4, 2, 0]
    np.testing.assert_array_equal(y_BTD[~mask_BT].view(bits), x_BTD[~mask_BT].view(bits))


def test_gathers_and_adds_each_token_in_its_place():
    rng = np.random.default_rng(5)
    x_BTD = rng.normal(size=(4, 9, 3)).astype(np.float32)
    logits_BT = rng.normal(size=(4, 9)).astype(np.float32)
    route = top_k(logits_BT, 5, k_B=np.asarray([5, 3, 1, 0]))
    x_BCD = np.asarray(gather(x_BTD, route))
    delta_BCD = rng.normal(size=x_BCD.shape).astype(np.float32)
    y_BTD = x_BTD.copy()
    for b in range(4):
        for c, t in enumerate(np.flatnonzero(route.mask_BT[b])):
            np.testing.assert_array_equal(x_BCD[b, c], x_BTD[b, t])
            y_BTD[b, t] += delta_BCD[b, c]
        np.testing.assert_array_equal(x_BCD[b, int(route.mask_BT[b].sum()) :], 0.0)
    np.testing.assert_array_equal(add(x_BTD, delta_BCD, route), y_BTD)


def test_gathering_does_not_look_at_other_tokens():
    x_BTD = np.full((2, 6, 3), np.nan, np.float32)
    x_BTD[:, [1, 4]] = 1.0
    mask_BT = jnp.zeros((2, 6), bool).at[:, jnp.asarray([1, 4])].set(True)
    x_BCD = np.asarray(gather(x_BTD, where(mask_BT, jnp.zeros((2, 6)))))
    np.testing.assert_array_equal(x_BCD[:, :2], 1.0)
    np.testing.assert_array_equal(x_BCD[:, 2:], 0.0)


def test_zero_update_leaves_the_input():
    x_BTD = jax.random.normal(jax.random.key(1), (2, 8, 4))
    route = top_k(jax.random.normal(jax.random.key(2), (2, 8)), 8)
    np.testing.assert_array_equal(add(x_BTD, jnp.zeros_like(x_BTD), route), x_BTD)


def _best_of_documents(logits_T, segments_T, capacity: float) -> list[int]:
    """Document by document: each takes its share, until the row's slots are used up."""
    T = len(logits_T)
    left, taken, start = max(1, min(T, round(capacity * T))), [], 0
    while start < T:
        stop = start
        while stop < T and segments_T[stop] == segments_T[start]:
            stop += 1
        if segments_T[start]:
            share = min(max(1, round(capacity * (stop - start))), left)
            best = best_positions(logits_T[start:stop], share, [True] * (stop - start))
            taken += [start + t for t in best]
            left -= share
        start = stop
    return taken


DOCUMENTS = [
    [1] * 12,
    [1] * 6 + [2] * 6,
    [1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1],
    [0, 0, 3, 3, 3, 3, 0, 5, 5, 5, 5, 0],
    [1, 1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0],
    list(range(1, 13)),  # twelve documents: more than the row has slots
    [0] * 12,
    [0] * 11 + [1],
]


@pytest.mark.parametrize("capacity", [0.125, 0.3, 0.5, 1.0])
def test_best_of_each_document(capacity):
    rng = np.random.default_rng(6)
    segments_BT = np.asarray(DOCUMENTS * 4)
    logits_BT = rng.integers(-2, 3, segments_BT.shape).astype(np.float32)  # many ties
    logits_BT[0], logits_BT[1] = 0.0, np.where(rng.random(12) < 0.5, 0.0, -0.0)
    mask_BT = best_of_documents(logits_BT, document_runs(segments_BT), capacity)
    for logits_T, segments_T, mask_T in zip(logits_BT, segments_BT, mask_BT, strict=True):
        expected = _best_of_documents(logits_T, segments_T, capacity)
        assert np.flatnonzero(mask_T).tolist() == sorted(expected)


@pytest.mark.quick
def test_a_document_chooses_whatever_the_others_hold():
    segments_BT = document_runs(jnp.asarray([[1] * 5 + [2] * 4 + [0] + [3] * 6]))
    logits_BT = jax.random.normal(jax.random.key(3), (1, 16))
    others_BT = jnp.where(segments_BT == 2, logits_BT, logits_BT * -1e3 + 7)
    mask_BT = best_of_documents(logits_BT, segments_BT, 0.5)
    moved_BT = best_of_documents(others_BT, segments_BT, 0.5)
    np.testing.assert_array_equal(mask_BT[0, 5:9], moved_BT[0, 5:9])
    assert not np.array_equal(mask_BT[0, :5], moved_BT[0, :5])
    assert np.asarray(mask_BT[0, 5:9]).sum() == 2


def test_overflow_is_taken_from_the_last_documents():
    segments_BT = jnp.arange(1, 9)[None]
    mask_BT = best_of_documents(jnp.arange(8.0)[None], segments_BT, 0.25)
    assert mask_BT[0].tolist() == [True, True] + [False] * 6


@pytest.mark.quick
def test_membership_loss_is_binary_cross_entropy():
    rng = np.random.default_rng(7)
    logits_BT = rng.normal(size=(3, 10)) * 4
    target_BT, valid_BT = rng.random((3, 10)) < 0.3, rng.random((3, 10)) < 0.7
    p_BT = 1 / (1 + np.exp(-logits_BT))
    nats_BT = -np.where(target_BT, np.log(p_BT), np.log1p(-p_BT))
    loss = jax.jit(membership_loss)(logits_BT.astype(np.float32), target_BT, valid_BT)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, nats_BT[valid_BT].mean(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_membership_loss_of_huge_logits_and_of_no_tokens(dtype):
    logits_BT = jnp.asarray([[1e4, -1e4, 3e4, -3e4]], dtype)
    target_BT = jnp.asarray([[True, False, False, True]])
    grad = jax.jit(jax.value_and_grad(membership_loss))
    loss, gradient_BT = grad(logits_BT, target_BT, jnp.ones((1, 4), bool))
    wrong = float(logits_BT[0, 2]) - float(logits_BT[0, 3])
    np.testing.assert_allclose(loss, wrong / 4, rtol=1e-6)
    np.testing.assert_array_equal(gradient_BT.astype(jnp.float32), [[0, 0, 0.25, -0.25]])
    assert loss.dtype == jnp.float32
    loss, gradient_BT = grad(logits_BT, target_BT, jnp.zeros((1, 4), bool))
    assert loss == 0 and not np.any(np.asarray(gradient_BT.astype(jnp.float32)))


def test_choice_is_kept_under_rematerialisation():
    # A second choice in the backward pass would show as a second top_k or sort in the jaxpr.
    def loss(logits_BT, x_BTD):
        route = route_top_k(logits_BT, 3)
        y_BTD = combine(x_BTD, dispatch(x_BTD, route) * route.weight_BC[..., None], route)
        return jnp.sum(jnp.sin(y_BTD))

    policy = jax.checkpoint_policies.save_only_these_names("modo_routed_tokens")
    function = functools.partial(jax.checkpoint, policy=policy)(loss)
    text = str(jax.make_jaxpr(jax.grad(function))(jnp.ones((2, 8)), jnp.ones((2, 8, 4))))
    assert text.count("top_k[") == 1
    assert text.count("sort[") == 1
