"""Decoding through caches against the parallel causal pass."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import modo
from modo import decode
from modo.decode import forward as module
from modo.decode.cache import default_routed_slots
from modo.decode.layers import most_rows
from modo.nn.depth import apply_gate
from modo.ops.cached_attention import cached_attention, completed_block_sums
from modo.ops.losses import cross_entropy
from modo.train.evaluation import eval_sums
from tests.decode.models import CONFIGS, forward, make_model, some_tokens

B, T = 3, 17
MAX = 20
# Chunks of 0, 1, 7, a block's and a block's and one more tokens, in other orders for other rows.
CHUNKS = np.asarray([[1, 7, 4, 0, 5], [0, 5, 7, 4, 1], [7, 0, 1, 5, 4]]).T
TOKENS = some_tokens(B, MAX)


def empty(model, batch=B, **options):
    if model.config.depth is not None:
        options = {"routed_slots": MAX} | options
    return decode.init_cache(model, batch, MAX, **options)


def take_chunks(model, cache, tokens_BT=TOKENS, chunks=CHUNKS, **options):
    """Prefills chunk by chunk; the logits of every token [B, T, V], and the cache."""
    at_B = np.asarray(cache.length_B).copy()
    logits_BTV = np.full((*tokens_BT.shape, model.config.vocab_size), np.nan, np.float32)
    for lengths_B in chunks:
        # What stands beyond the lengths is no token at all.
        chunk_BT = np.full((len(at_B), 7), -1, np.int32)
        for b, n in enumerate(lengths_B):
            chunk_BT[b, :n] = tokens_BT[b, at_B[b] : at_B[b] + n]
        new_BTV, cache = decode.prefill(model, cache, chunk_BT, lengths_B, **options)
        for b, n in enumerate(lengths_B):
            logits_BTV[b, at_B[b] : at_B[b] + n] = new_BTV[b, :n]
        at_B += lengths_B
    np.testing.assert_array_equal(cache.length_B, at_B)
    return logits_BTV, cache


def take_steps(model, cache, tokens_BT, **options):
    """Token by token: logits [B, T, V] and the cache."""
    logits = []
    for tokens_B in tokens_BT.T:
        logits_BV, cache = decode.step(model, cache, tokens_B, **options)
        logits.append(np.asarray(logits_BV))
    return np.stack(logits, axis=1), cache


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return make_model(CONFIGS[request.param])


@pytest.fixture(scope="module")
def both():
    return make_model(CONFIGS["both"])


def trained_and_not(model):
    """The same model as it is, untrained, and with layers that route nothing or everything."""
    yield model
    if model.config.depth is not None:
        yield make_model(model.config, bias=-1e3)
        yield make_model(model.config, bias=1e3)
    yield modo.Decoder(model.config, rngs=nnx.Rngs(3))


def test_chunks_and_steps_equal_the_causal_pass(model):
    seen = []
    compiled = module._step._cache_size()
    for variant in trained_and_not(model):
        expected, routed_LBT = forward(variant, TOKENS)
        logits, cache = take_chunks(variant, empty(variant))
        assert_close(logits[:, :T], expected[:, :T])
        np.testing.assert_array_equal(cache.routed_LBT()[..., :T], routed_LBT[..., :T])
        logits, cache = take_steps(variant, cache, TOKENS[:, T:])
        assert_close(logits, expected[:, T:])
        np.testing.assert_array_equal(cache.routed_LBT(), routed_LBT)
        assert not cache.dropped_LB().any()
        seen.append(routed_LBT.mean() if routed_LBT.size else None)
    assert module._step._cache_size() == compiled + 1
    if model.config.depth is not None:
        assert 0.1 < seen[0] < 0.9 and seen[1:3] == [0, 1]


def test_one_shot(both):
    """Traced, so that both ways of attention are there, and by the router's own logits."""
    expected, routed_LBT = forward(both, TOKENS, routing="router")
    graphdef, params = nnx.split(both)

    @jax.jit
    def prefill(params, cache, tokens_BT, lengths_B):
        model = nnx.merge(graphdef, params)
        return decode.prefill(model, cache, tokens_BT, lengths_B, routing="router", last_only=True)

    cache = empty(both)
    logits_BV, cache = prefill(params, cache, TOKENS, np.asarray([MAX, 5, 0]))
    assert_close(logits_BV[0], expected[0, -1])
    assert_close(logits_BV[1], expected[1, 4])
    # The second time around there is no room for all: the rest is left out, and it shows.
    later_BT = np.roll(TOKENS, -5, axis=1)
    logits_BV, cache = prefill(params, cache, later_BT, np.asarray([1, MAX - 5, MAX]))
    assert np.isnan(logits_BV[0]).all()
    assert_close(logits_BV[1], expected[1, -1])
    assert_close(logits_BV[2], forward(both, later_BT, routing="router")[0][2, -1])
    np.testing.assert_array_equal(cache.length_B, MAX)
    np.testing.assert_array_equal(cache.routed_LBT()[:, :2], routed_LBT[:, :2])


def test_rows_of_unequal_length_are_as_each_alone(both):
    lengths_B = np.asarray([7, 0, 3])
    logits, cache = take_chunks(both, empty(both), chunks=[lengths_B])
    steps, _ = take_steps(both, cache, TOKENS[:, 10:15])
    for b, n in enumerate(lengths_B):
        tokens_1T = np.concatenate([TOKENS[b, :n], TOKENS[b, 10:15]])[None]
        alone, cache_1 = take_steps(both, empty(both, 1), tokens_1T)
        assert_close(alone[0, :n], logits[b, :n])
        assert_close(alone[0, n:], steps[b])
        assert_close(alone[0], forward(both, np.resize(tokens_1T, (B, MAX)))[0][0, : n + 5])


def poison(cache):
    """NaN in everything that was not written."""

    def fill(x, held_BS):
        return None if x is None else jnp.where(held_BS[:, None, :, None], x, jnp.nan)

    layers = []
    for layer in cache.layers:
        count_B = cache.length_B if layer.count_B is None else layer.count_B
        held_BS = np.arange(layer.slots) < count_B[:, None]
        sums = layer.key_sums_BKSH
        if sums is not None:
            sums = fill(sums, np.arange(sums.shape[2]) < (count_B // layer.block)[:, None])
        layers.append(
            dataclasses.replace(
                layer,
                k_BKSH=fill(layer.k_BKSH, held_BS),
                v_BKSH=fill(layer.v_BKSH, held_BS),
                raw_keys_BKSH=fill(layer.raw_keys_BKSH, held_BS),
                key_sums_BKSH=sums,
                wanted_BT=None
                if layer.wanted_BT is None
                else layer.wanted_BT | ~(np.arange(MAX) < cache.length_B[:, None]),
            )
        )
    return dataclasses.replace(cache, layers=tuple(layers))


def test_what_was_not_written_never_shows(model):
    expected, routed_LBT = forward(model, TOKENS)
    logits, cache = take_chunks(model, poison(empty(model)))
    assert_close(logits[:, :T], expected[:, :T])
    logits, cache = take_steps(model, poison(cache), TOKENS[:, T:])
    assert_close(logits, expected[:, T:])
    np.testing.assert_array_equal(cache.routed_LBT(), routed_LBT)


def assert_same(a, b):
    """Two caches hold the same, bit by bit."""
    for x, y in zip(jax.tree.leaves(poison(a)), jax.tree.leaves(poison(b)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_reset_roll_back_and_rows(model):
    other = some_tokens(B, MAX, seed=1)
    _, first = take_chunks(model, empty(model))
    # Back to where some chunks ended, on with other tokens, and back again.
    back = decode.roll_back(first, np.asarray([8, 1, 7]))
    _, astray = take_chunks(model, back, other, chunks=[[7, 2, 5], [5, 7, 4]])
    again = decode.roll_back(astray, np.asarray([8, 1, 7]))
    np.testing.assert_array_equal(again.length_B, [8, 1, 7])
    assert_same(again, back)
    # The first tokens in the chunks that they came in at first, and all is the same bit by bit.
    again = decode.reset(again, np.asarray([False, True, False]))
    np.testing.assert_array_equal(again.length_B, [8, 0, 7])
    _, again = take_chunks(model, again, chunks=[[0, 5, 0], *CHUNKS[2:]])
    assert_same(again, first)
    rows = np.asarray([2, 2, 0])
    logits, _ = take_steps(model, decode.take_rows(again, rows), TOKENS[rows, T:])
    assert_close(logits, forward(model, TOKENS)[0][rows, T:])


def test_a_chunk_of_one_token_is_a_step(both):
    _, cache = take_chunks(both, empty(both))
    logits_BV, stepped = decode.step(both, cache, TOKENS[:, T])
    lengths_B = np.asarray([1, 0, 1])
    logits_B1V, chunked = decode.prefill(both, cache, TOKENS[:, T : T + 1], lengths_B)
    assert_close(logits_B1V[[0, 2], 0], logits_BV[np.asarray([0, 2])])
    np.testing.assert_array_equal(chunked.length_B, T + lengths_B)
    np.testing.assert_array_equal(chunked.routed_LBT()[:, [0, 2]], stepped.routed_LBT()[:, [0, 2]])
    none_B0V, same = decode.prefill(both, cache, TOKENS[:, :0], np.zeros(B, int))
    assert none_B0V.shape == (B, 0, 30)
    assert_same(same, cache)


def test_a_long_text_in_chunks_has_the_loss_of_evaluation(both):
    """Windows of the evaluation's length, each through a cache of its own."""
    tokens_BT, targets_BT = TOKENS[:, :T], TOKENS[:, 1 : T + 1]
    batch = {
        "tokens_BT": tokens_BT,
        "targets_BT": targets_BT,
        "weights_BT": np.ones((B, T), np.float32),
        "positions_BT": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        "segment_ids_BT": np.ones((B, T), np.int32),
    }
    sums = eval_sums(*nnx.split(both), batch, jax.random.key(0), routing="predictor")
    logits_BTV, cache = take_chunks(both, empty(both), tokens_BT)
    nats_BT, _ = cross_entropy(jnp.asarray(logits_BTV), jnp.asarray(targets_BT))
    np.testing.assert_allclose(jnp.sum(nats_BT, axis=1), sums["nats_B"], rtol=1e-5)
    routed_LT = jnp.sum(cache.routed_LBT(), axis=1)[:, :T]
    np.testing.assert_array_equal(routed_LT, sums["routed_LT"])


def test_inactive_rows_stay_as_they_are(both):
    _, cache = take_chunks(both, empty(both))
    active_B = np.asarray([True, False, True])
    logits_BV, after = decode.step(both, cache, np.asarray([1, -1, 2]), active_B=active_B)
    np.testing.assert_array_equal(after.length_B, [T + 1, T, T + 1])
    assert_same(*(decode.take_rows(x, np.asarray([1])) for x in (cache, after)))
    tokens_BT = TOKENS.copy()
    tokens_BT[[0, 2], T] = 1, 2
    assert_close(logits_BV[active_B], forward(both, tokens_BT)[0][active_B, T])


def test_a_full_row_stays_as_it_is_under_jit(both):
    _, cache = take_chunks(both, empty(both))
    cache = dataclasses.replace(cache, length_B=cache.length_B.at[1].set(MAX))
    # Outside of jit it would be refused.
    logits_BV, after = module._step(
        *nnx.split(both), cache, TOKENS[:, T], np.ones(B, bool), routing="predictor", sparse=True
    )
    np.testing.assert_array_equal(np.isnan(logits_BV).all(-1), [False, True, False])
    assert_same(*(decode.take_rows(x, np.asarray([1])) for x in (cache, after)))


def with_few_slots(model, tokens_BT, slots):
    """Logits where only the first `slots` tokens that a routed layer wants are computed."""
    positions_BT = np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)
    x_BTD, wanted = model.embedding(tokens_BT), []
    for layer in range(model.config.num_layers):
        block, ids_BT, gate_BT = model.block(layer), None, None
        if layer in model.config.routed_layers:
            logits_BT, predictor_BT = block.scores(x_BTD)
            wanted.append(predictor_BT > 0)
            ids_BT = (wanted[-1] & (jnp.cumsum(wanted[-1], 1) <= slots)).astype(jnp.int32)
            gate_BT, block = jnp.where(ids_BT, apply_gate(block.gate, logits_BT), 0), block.block
        delta_BTD = block(x_BTD, positions_BC=positions_BT, segment_ids_BC=ids_BT, gate_BC=gate_BT)
        if ids_BT is not None:
            delta_BTD = jnp.where(ids_BT[..., None] > 0, delta_BTD, 0)
        x_BTD += delta_BTD
    return model.logits(x_BTD), jnp.stack(wanted)


def test_what_finds_no_slot_skips_the_layer_and_is_counted():
    model = make_model(CONFIGS["mod"])
    expected, wanted_LBT = jax.tree.map(
        np.asarray, jax.jit(lambda t: with_few_slots(model, t, 4))(TOKENS)
    )
    logits, cache = take_chunks(model, empty(model, routed_slots=4))
    assert_close(logits[:, :T], expected[:, :T])
    logits, cache = take_steps(model, cache, TOKENS[:, T:])
    assert_close(logits, expected[:, T:])
    np.testing.assert_array_equal(cache.wanted_LBT(), wanted_LBT)
    dropped_LB = wanted_LBT.sum(-1) - np.minimum(wanted_LBT.sum(-1), 4)
    assert dropped_LB.any()
    np.testing.assert_array_equal(cache.dropped_LB(), dropped_LB)
    back = decode.roll_back(cache, np.full(B, 9))
    np.testing.assert_array_equal(back.dropped_LB(), np.maximum(wanted_LBT[..., :9].sum(-1) - 4, 0))
    np.testing.assert_array_equal(
        [layer.count_B for layer in back.layers if layer.count_B is not None],
        np.minimum(wanted_LBT[..., :9].sum(-1), 4),
    )


def test_full_attention_on_demand():
    """Over what a MoBA model has cached, in one shot and by steps, as a model without MoBA."""
    moba = make_model(CONFIGS["moba"])
    full = modo.Decoder(dataclasses.replace(moba.config, moba=None), rngs=nnx.Rngs(0))
    full = nnx.merge(nnx.split(full)[0], nnx.split(moba)[1])
    expected, _ = forward(full, TOKENS)
    logits, cache = take_chunks(moba, empty(moba), attention="full")
    assert_close(logits[:, :T], expected[:, :T])
    logits, _ = take_steps(moba, cache, TOKENS[:, T:], attention="full")
    assert_close(logits, expected[:, T:])
    assert np.abs(logits - forward(moba, TOKENS)[0][:, T:]).max() > 1e-3


def test_scanned_layers():
    scanned = make_model(dataclasses.replace(CONFIGS["mod"], scan_layers=True))
    plain = scanned.unstacked()
    assert plain.unstacked() is plain and not plain.config.scan_layers
    expected, _ = forward(scanned, TOKENS)
    assert_close(forward(plain, TOKENS)[0], expected)
    assert_close(take_steps(plain, empty(plain), TOKENS[:, :3])[0], expected[:, :3])


# --- The operations ------------------------------------------------------------------------------


def test_block_sums_do_not_depend_on_how_keys_came():
    k_BKSH = jax.random.normal(jax.random.key(0), (2, 3, 24, 8), jnp.bfloat16)
    expected = np.asarray(k_BKSH, np.float64).reshape(2, 3, 6, 4, 8).sum(3)
    block_sums = jax.jit(completed_block_sums, static_argnums=(1, 4))
    found = {}
    for most in (1, 7, 24):
        sums = np.full((2, 3, 7, 8), np.nan, np.float32)
        for start in range(0, 24, most):
            added = min(most, 24 - start)
            number_BJ, new = block_sums(
                k_BKSH, 4, np.asarray([start, 0]), np.asarray([added, 3]), most
            )
            assert (number_BJ[1] == 6).all()
            for j, number in enumerate(np.asarray(number_BJ[0])):
                sums[0, :, number] = new[0, :, j]
        found[most] = sums[0, :, :6]
        np.testing.assert_allclose(found[most], expected[0], rtol=1e-5, atol=1e-6)
    for sums in found.values():
        np.testing.assert_array_equal(sums, found[1])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_tiles_and_pieces(monkeypatch, kv_heads):
    monkeypatch.setattr("modo.ops.cached_attention._TILE", 8)
    monkeypatch.setattr("modo.ops.cached_attention._PIECE_ELEMENTS", 8 * 2 * 2 * 3)
    S, C = 21, 10
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, C, 2, 8))
    k, v = (jax.random.normal(key, (2, kv_heads, S, 8)) for key in keys[1:])
    slot_BC = np.asarray([np.arange(C) + 11, np.arange(C)])
    slot_BC[1, 4:] = -1
    v = v.at[1, :, 4:].set(jnp.nan).at[0, :, :].set(v[0])
    out = jax.jit(cached_attention)(q, k, v, slot_BC)
    for b, c in np.ndindex(2, C):
        n = slot_BC[b, c] + 1
        for head in range(2):
            h = head * kv_heads // 2
            score = np.asarray(k[b, h, :n] @ q[b, c, head]) / 8**0.5
            p = np.exp(score - score.max(initial=-1e9))
            expected = (p / max(p.sum(), 1e-9)) @ np.asarray(v[b, h, :n])
            np.testing.assert_allclose(out[b, c, head], expected, atol=1e-5)


# --- Work saved, memory, devices -----------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 6])
def test_a_step_copies_no_cache(both, batch):
    cache = decode.init_cache(both, batch, 512, routed_slots=256)
    graphdef, params = nnx.split(both)
    step = jax.jit(
        lambda p, cache, t: decode.step(nnx.merge(graphdef, p), cache, t), donate_argnums=1
    )
    compiled = step.lower(params, cache, jnp.zeros(batch, jnp.int32)).compile()
    least = min(layer.k_BKSH.size for layer in cache.layers)
    copies = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|transpose)\(", compiled.as_text())
    sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in copies]
    assert sizes and max(sizes) < least
    # Everything that is donated is used again.
    assert compiled.memory_analysis().alias_size_in_bytes == cache.nbytes


def test_slots_and_bytes():
    assert default_routed_slots(0.125, 2048) == 384
    assert default_routed_slots(0.125, 64) == 16
    assert default_routed_slots(0.125, 9) == 9
    assert default_routed_slots(1.0, 100) == 100
    config = modo.ModelConfig(vocab_size=9, d_model=256, num_layers=4, num_heads=4)
    dense, mod = (
        jax.eval_shape(
            lambda depth=depth: decode.init_cache(
                modo.Decoder(dataclasses.replace(config, depth=depth), rngs=nnx.Rngs(0)), 1, 2048
            )
        ).nbytes
        for depth in (None, modo.DepthConfig(every=2, capacity=0.125))
    )
    assert dense == 4 * 2 * 2048 * 256 * 4 + 4
    assert mod / dense < 0.60


def test_planned_rows():
    assert [most_rows(n, 0.125) for n in (1, 2, 16, 256)] == [1, 1, 4, 41]
    assert most_rows(5000, 0.5) == 2558 and most_rows(16, 1.0) == 16 and most_rows(8, 1e-9) == 1


def test_under_a_mesh():
    """In a process of its own, where the CPU counts as eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.decode.mesh"]
    subprocess.run(command, env=environment, cwd=pathlib.Path(__file__).parents[2], check=True)


# --- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(batch=0), "batch must be at least 1, got 0"),
        (dict(max_length=0), "max_length must be at least 1, got 0"),
        (dict(routed_slots=0), "routed_slots must be at least 1, got 0"),
        (dict(batch=2.0), "batch must be a whole number, got 2.0"),
        (dict(max_length=True), "max_length must be a whole number, got True"),
        (dict(routed_slots=9), r"routed_slots must be in \[1, max_length 8\], got 9"),
    ],
)
def test_bad_caches(both, arguments, message):
    with pytest.raises(ValueError, match=message):
        decode.init_cache(both, **(dict(batch=2, max_length=8) | arguments))


def test_bad_calls(both):
    cache = decode.init_cache(both, 2, 8)
    tokens = np.zeros((2, 5), np.int32)

    def check(message, model=both, cache=cache, tokens=tokens, lengths=(1, 5), **options):
        with pytest.raises(ValueError, match=message):
            decode.prefill(model, cache, tokens, np.asarray(lengths), **options)

    check("must be causal, predictor or router, got 'top_k'", routing="top_k")
    check("sparse or full, got 'dense'", attention="dense")
    check(r"with B 2, got \(3, 5\)", tokens=np.zeros((3, 5), np.int32))
    check(r"with B 2, got \(0, 5\)", tokens=np.zeros((0, 5), np.int32))
    check(r"lengths must be \[B\] = \(2,\), got \(3,\)", lengths=(1, 1, 1))
    check(r"lengths must be in \[0, 5\], got 1 to 6", lengths=(1, 6))
    check(r"lengths must be in \[0, 5\], got -1 to 1", lengths=(-1, 1))
    check("tokens must be integers, got float32", tokens=np.zeros((2, 5), np.float32))
    check(r"tokens must be in \[0, 30\), got 30", tokens=np.full((2, 5), 30))
    check("row 1 has 0 tokens and gets 9 more, but the cache holds 8",
          tokens=np.zeros((2, 9), np.int32), lengths=(1, 9))  # fmt: skip
    full = dataclasses.replace(cache, length_B=jnp.asarray([8, 3]))
    with pytest.raises(ValueError, match="row 0 has 8 tokens and gets 1 more"):
        decode.step(both, full, tokens[:, 0])
    with pytest.raises(ValueError, match=r"tokens must be \[B\] = \(2,\), got \(3,\)"):
        decode.step(both, cache, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"active must be bool \[B\] = \(2,\), got int32"):
        decode.step(both, cache, tokens[:, 0], active_B=np.ones(2, np.int32))
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 30\), got -1"):
        decode.step(both, cache, -np.ones(2, np.int32))
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        decode.roll_back(cache, np.asarray([-1, 2]))
    for lengths, message in (
        ([2**32, 1], "lengths must fit in 32 bits"),
        ([1.9, 1.2], "lengths must be integers, got float64"),
        ([True, False], "lengths must be integers, got bool"),
    ):
        with pytest.raises(ValueError, match=message):
            decode.roll_back(cache, lengths)
    for rows in (np.ones(3, bool), [1, 0]):
        with pytest.raises(ValueError, match=r"rows must be bool \[B\] = \(2,\)"):
            decode.reset(cache, rows)
    for rows, message in (
        ([0, 2], r"rows must be in \[0, 2\), got 0 to 2"),
        ([-1], r"rows must be in \[0, 2\), got -1 to -1"),
        ([], r"rows must be \[B\] with B at least 1, got \(0,\)"),
        (1, r"rows must be \[B\] with B at least 1, got \(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            decode.take_rows(cache, rows)

    def other(**changes):
        return modo.Decoder(dataclasses.replace(both.config, **changes), rngs=nnx.Rngs(0))

    moba = both.config.moba
    check(
        "of layer 0, only one of cache and model convolves keys",
        model=other(moba=dataclasses.replace(moba, key_convolution=None)),
    )
    check("layer 0 computes in bfloat16, but its cache holds float32",
          model=other(compute_dtype="bfloat16"))  # fmt: skip
    check(
        "layer 0 attends in blocks of 8, but its cache has blocks of 4",
        model=other(moba=dataclasses.replace(moba, block_size=8)),
    )
    check("the cache has 4 layers, the model has 5", model=other(num_layers=5))
    check("2 key heads of width 8, but its cache is for 4", model=other(num_kv_heads=2),
          cache=decode.init_cache(other(num_kv_heads=4), 2, 8))  # fmt: skip
    check("only one of cache and model is routed", model=other(depth=None))
    check(
        "needs a model with DepthConfig.predictor",
        model=other(depth=dataclasses.replace(both.config.depth, predictor=False)),
    )
