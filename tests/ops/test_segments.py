import jax.numpy as jnp
import numpy as np
import pytest

from modo.ops import document_runs

ROWS = [
    ([1, 1, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3]),
    ([7, 7, 7, 7, 7, 7], [1, 1, 1, 1, 1, 1]),
    ([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2]),  # padding on the left
    ([4, 4, 4, 9, 0, 0], [1, 1, 1, 2, 0, 0]),  # on the right
    ([1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 2, 2]),  # in the middle: two documents
    ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
    ([-3, -3, 0, 5, 5, -3], [1, 1, 0, 2, 2, 3]),
    ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8])
def test_runs_are_numbered_apart(dtype):
    ids_BT, expected_BT = (np.asarray(rows) for rows in zip(*ROWS, strict=True))
    runs_BT = document_runs(jnp.asarray(ids_BT, dtype))
    assert runs_BT.dtype == jnp.int32
    np.testing.assert_array_equal(runs_BT, expected_BT)


def test_numbering_runs_again_changes_nothing():
    runs_BT = document_runs(jnp.asarray([ids for ids, _ in ROWS]))
    np.testing.assert_array_equal(document_runs(runs_BT), runs_BT)


def test_a_single_token():
    np.testing.assert_array_equal(document_runs(jnp.asarray([[0], [3]])), [[0], [1]])
