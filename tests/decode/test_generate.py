"""Generation against the model run by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import modo
from modo.decode import stream
from modo.decode.generate import _generate as compiled
from modo.decode.sampling import Sampling, draw

pytestmark = pytest.mark.quick
LENGTHS = np.array([5, 1, 0])


@pytest.fixture(scope="module")
def model():
    config = modo.ModelConfig(
        vocab_size=30,
        d_model=16,
        num_layers=2,
        num_heads=2,
        d_ff=32,
        depth=modo.DepthConfig(capacity=0.3),
        moba=modo.MobaConfig(block_size=4, top_k=2),
    )
    model = modo.Decoder(config, rngs=nnx.Rngs(0))
    # An untrained predictor skips everything; let these route about half.
    graphdef, params = nnx.split(model)
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: (
            jax.random.normal(jax.random.key(1), p.shape) if "score" in str(path) else p
        ),
        params,
    )
    return nnx.merge(graphdef, params)


@pytest.fixture(scope="module")
def prompts():
    return np.asarray(jax.random.randint(jax.random.key(2), (3, 5), 1, 30))


def test_greedy_equals_growing_the_row_by_hand(model, prompts):
    new = modo.generate(model, prompts, LENGTHS, max_new_tokens=4, bos_token=0)
    assert new.shape == (3, 4) and new.dtype == jnp.int32
    forward = jax.jit(lambda tokens: model(tokens, routing="predictor"))  # later tokens: unseen
    routed = 0
    for row, length in enumerate(LENGTHS):
        tokens = list(prompts[row, :length]) or [0]
        for token in np.asarray(new[row]):
            logits, aux = forward(jnp.asarray([tokens + [0] * (9 - len(tokens))]))
            routed += int(aux.routed_LBT[..., : len(tokens)].sum())
            assert int(logits[0, len(tokens) - 1].argmax()) == token
            tokens.append(token)
    assert routed > 0


def test_unequal_prompts_generate_as_each_alone(model, prompts):
    together = modo.generate(model, prompts, LENGTHS, max_new_tokens=4, bos_token=0)
    for row, length in enumerate(LENGTHS):
        prompt = prompts[row : row + 1, : max(length, 1)]
        alone = modo.generate(model, prompt, LENGTHS[row : row + 1], max_new_tokens=4, bos_token=0)
        np.testing.assert_array_equal(alone[0], together[row])


def test_what_stands_beyond_a_prompt_is_ignored(model, prompts):
    other = prompts.copy()
    other[1, 1:] = 29
    for a in (prompts, other):
        a = modo.generate(model, a, LENGTHS, max_new_tokens=3, bos_token=0)
        np.testing.assert_array_equal(
            a, modo.generate(model, prompts, LENGTHS, max_new_tokens=3, bos_token=0)
        )


def test_sampling_is_seeded_and_follows_the_temperature(model, prompts):
    def sample(seed, temperature):
        return np.asarray(
            modo.generate(
                model,
                prompts,
                np.array([5, 5, 5]),
                max_new_tokens=8,
                temperature=temperature,
                key=jax.random.key(seed),
            )
        )

    np.testing.assert_array_equal(sample(0, 1.0), sample(0, 1.0))
    assert (sample(0, 1.0) != sample(1, 1.0)).any()
    greedy = modo.generate(model, prompts, np.array([5, 5, 5]), max_new_tokens=8)
    np.testing.assert_array_equal(sample(0, 1e-6), greedy)


def test_rows_with_seeds_sample_as_each_alone(model, prompts):
    options = dict(max_new_tokens=6, temperature=1.0, top_k=20, top_p=0.9, bos_token=0)
    seeds = [7, 3, 7]
    together = modo.generate(model, prompts, LENGTHS, seeds_B=seeds, **options)
    for row, seed in enumerate(seeds):
        one = slice(row, row + 1)
        alone = modo.generate(model, prompts[one], LENGTHS[one], seeds_B=[seed], **options)
        np.testing.assert_array_equal(alone[0], together[row])


def test_draws_follow_the_truncated_distribution():
    logits_V = jnp.log(jnp.asarray([0.1, 0.4, 0.1, 0.3, 0.1]))
    key_B = jax.random.split(jax.random.key(0), 4000)
    logits_BV = jnp.broadcast_to(logits_V, (4000, 5))
    for options, expected in (
        (dict(), [0.1, 0.4, 0.1, 0.3, 0.1]),
        (dict(top_k=3), [1 / 8, 4 / 8, 0, 3 / 8, 0]),  # of equals the lowest
        (dict(top_p=0.65), [0, 4 / 7, 0, 3 / 7, 0]),
        (dict(top_p=0.75), [1 / 8, 4 / 8, 0, 3 / 8, 0]),
        (dict(top_k=2, top_p=0.5), [0, 1, 0, 0, 0]),  # of what top_k left, 4 / 7
        (dict(top_p=1e-9), [0, 1, 0, 0, 0]),
        (dict(temperature=0.5), np.array([1, 16, 1, 9, 1]) / 28),
    ):
        token_B = draw(logits_BV, key_B, Sampling(**{"temperature": 1.0, **options}))
        share_V = np.bincount(np.asarray(token_B), minlength=5) / 4000
        assert np.all((share_V > 0) == (np.asarray(expected) > 0)), options
        np.testing.assert_allclose(share_V, expected, atol=0.03)


def test_rows_stop_apart_and_repeat_what_they_stopped_with(model, prompts):
    free = np.asarray(modo.generate(model, prompts, LENGTHS, max_new_tokens=8, bos_token=0))
    stop = int(free[0, 3])
    ended = np.asarray(
        modo.generate(
            model, prompts, LENGTHS, max_new_tokens=8, bos_token=0, stop_tokens=[stop, 29]
        )
    )
    for row in range(3):
        stops = np.flatnonzero(np.isin(free[row], [stop, 29]))
        end = stops[0] if len(stops) else 8
        np.testing.assert_array_equal(ended[row, : end + 1], free[row, : end + 1])
        assert np.all(ended[row, end:] == free[row, min(end, 7)])


def test_a_stream_gives_the_same_in_pieces_and_ends_early(model, prompts):
    options = dict(bos_token=0, temperature=1.0, key=jax.random.key(3))
    whole = modo.generate(model, prompts, LENGTHS, max_new_tokens=9, **options)
    pieces = stream(model, prompts, LENGTHS, max_new_tokens=9, chunk=3, **options)
    pieces = [np.asarray(piece) for piece, _ in pieces]
    assert [piece.shape[1] for piece in pieces] == [1, 3, 3, 2]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)
    pieces = stream(
        model, prompts[1:2], LENGTHS[1:2], max_new_tokens=9, chunk=3, stop_tokens=range(30)
    )
    assert len(list(pieces)) == 1
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        stream(model, prompts, LENGTHS, max_new_tokens=9, chunk=0)


def test_a_stream_is_the_same_where_slots_run_out(model, prompts):
    """However long its chunks are: it has the slots of `generate`, and counts the same tokens."""
    arguments = (model, prompts, np.array([5, 5, 5]))
    options = dict(max_new_tokens=6, routed_slots=1)
    with pytest.warns(UserWarning) as told:
        whole = modo.generate(*arguments, **options)
    with pytest.warns(UserWarning) as told_in_pieces:
        pieces = [np.asarray(piece) for piece, _ in stream(*arguments, chunk=40, **options)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)
    assert str(told[0].message) == str(told_in_pieces[0].message)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_prompts_of_narrow_types(prompts, dtype):
    """Their vocabulary, or the start token, may be beyond what the type holds."""
    config = modo.ModelConfig(vocab_size=300, d_model=8, num_layers=1, num_heads=1, d_ff=8)
    wide = modo.Decoder(config, rngs=nnx.Rngs(0))
    expected = modo.generate(wide, prompts, LENGTHS, max_new_tokens=3, bos_token=256)
    actual = modo.generate(wide, prompts.astype(dtype), LENGTHS, max_new_tokens=3, bos_token=256)
    np.testing.assert_array_equal(actual, expected)


def test_one_compilation(model, prompts):
    key = jax.random.key(0)
    arguments = dict(max_new_tokens=5)
    modo.generate(model, prompts, np.array([5, 2, 3]), key=key, temperature=1.0, **arguments)
    before = compiled._cache_size()
    for row in range(2):
        modo.generate(
            model,
            prompts[::-1],
            np.array([1, 5, 2]),
            key=jax.random.key(row),
            temperature=0.5 + row,
            **arguments,
        )
    assert compiled._cache_size() == before


def test_tokens_without_a_slot_are_told_of(model, prompts):
    with pytest.warns(UserWarning, match=r"tokens skipped a routed layer .* raise routed_slots"):
        modo.generate(model, prompts, np.array([5, 5, 5]), max_new_tokens=8, routed_slots=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(lengths_B=np.array([6, 1, 1])), r"\[0, 5\], got 1 to 6"),
        (dict(lengths_B=np.array([-1, 1, 1])), r"\[0, 5\], got -1 to 1"),
        (dict(lengths_B=np.array([1, 1])), r"lengths must be \[B\]"),
        (dict(lengths_B=np.array([0, 1, 1])), "needs a bos_token"),
        (dict(prompts_BT=np.zeros((0, 5), int)), "B at least 1"),
        (dict(prompts_BT=np.full((3, 5), 30)), r"\[0, 30\), got 30"),
        (dict(prompts_BT=np.full((3, 5), -1)), r"\[0, 30\), got -1"),
        (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (dict(temperature=-0.5), "not negative, got -0.5"),
        (dict(temperature=float("nan")), "not negative, got nan"),
        (dict(temperature=1e-38, key=jax.random.key(0)), "temperature must be 0 or in"),
        (dict(temperature=1e39, key=jax.random.key(0)), "temperature must be 0 or in"),
        (dict(temperature=1.0, key=np.zeros((2, 3))), "key must come from jax.random.key"),
        (dict(temperature=1.0, seeds_B=[1, 2, 2**32]), r"seeds must be in \[0, 4294967295\]"),
        (dict(temperature=1.0, seeds_B=[1, 2, -1]), r"seeds must be in \[0, 4294967295\], got -1"),
        (dict(prompts_BT=np.full((3, 5), 2**32 + 3)), "prompts must fit in 32 bits"),
        (dict(lengths_B=np.array([2**32 + 1, 1, 1])), "lengths must fit in 32 bits"),
        (dict(max_new_tokens=2.0), "max_new_tokens must be a whole number, got 2.0"),
        (dict(top_k=2.5), "top_k must be a whole number, got 2.5"),
        (dict(top_k=2**31), "top_k must be at most 2147483647, got 2147483648"),
        (dict(temperature=1.0, key=1, seeds_B=[1, 2, 3]), "not both"),
        (dict(temperature=1.0, seeds_B=[1, 2]), r"seeds must be integers \[B\] = \(3,\)"),
        (dict(top_k=0), "top_k must be at least 1, got 0"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0"),
        (dict(stop_tokens=[30]), r"stop_tokens must be in \[0, 30\), got 30"),
        (dict(routed_slots=0), r"routed_slots must be at least 1"),
        (dict(attention="dense"), "attention must be sparse or full"),
        (dict(prompts_BT=np.zeros((3, 5))), "prompts must be integers, got float"),
        (dict(temperature=1.0), "needs a key"),
        (dict(routing="top_k"), "must be causal"),
        (dict(bos_token=30, lengths_B=np.array([0, 1, 1])), r"bos_token must be in \[0, 30\)"),
    ],
)
def test_bad_input(model, prompts, change, message):
    arguments = dict(prompts_BT=prompts, lengths_B=np.array([5, 1, 1]), max_new_tokens=2) | change
    with pytest.raises(ValueError, match=message):
        modo.generate(model, **arguments)
