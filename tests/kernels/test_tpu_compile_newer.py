import jax.numpy as jnp
import pytest

from tests.kernels.tpu_compilation import MILLION, cases_of, check_case

BF16, F32 = jnp.bfloat16, jnp.float32
CASES = [
    *cases_of(("v6e", "tpu7x")),
    ("v6e", 16384, 2, 1, 128, 128, 8, BF16, False),
    ("tpu7x", 16384, 2, 1, 64, 512, 3, BF16, False),
    ("v6e", 131072, 2, 1, 128, 512, 4, BF16, False),
    ("v5p", MILLION, 8, 1, 128, 4096, 12, BF16, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:7])))
def test_compiles(case):
    check_case(*case)
