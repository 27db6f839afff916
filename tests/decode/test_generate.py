"""Generation against the model run by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import modo

pytestmark = pytest.mark.quick
LENGTHS = np.array([5, 1, 0])


@pytest.fixture(scope="module")
def model():
    config = modo.ModelConfig(
        vocab_size=30,
        d_model=16,
        num_layers=4,
        num_heads=2,
        d_ff=32,
        depth=modo.DepthConfig(capacity=0.3),
        moba=modo.MobaConfig(block_size=4, top_k=2),
        scan_layers=True,
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
    forward = jax.jit(lambda tokens: model(tokens, routing="predictor"))
    routed = 0
    for row, length in enumerate(LENGTHS):
        tokens = list(prompts[row, :length]) or [0]
        for token in np.asarray(new[row]):
            logits, aux = forward(jnp.asarray([tokens]))
            routed += int(aux.routed_LBT.sum())
            assert int(logits[0, -1].argmax()) == token
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
        (dict(max_new_tokens=0), "at least 1, got 0"),
        (dict(temperature=-0.5), "not be negative, got -0.5"),
        (dict(temperature=1.0), "needs a key"),
        (dict(routing="top_k"), "must be causal"),
        (dict(bos_token=30, lengths_B=np.array([0, 1, 1])), r"bos_token must be in \[0, 30\)"),
    ],
)
def test_bad_input(model, prompts, change, message):
    arguments = dict(prompts_BT=prompts, lengths_B=np.array([5, 1, 1]), max_new_tokens=2) | change
    with pytest.raises(ValueError, match=message):
        modo.generate(model, **arguments)
