import jax.numpy as jnp
import pytest

from tests.kernels.tpu_compilation import MILLION, cases_of, check_case, check_mod

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


@pytest.mark.parametrize("generation", ("v6e", "tpu7x"))
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_mod_compiles(generation, dtype):
    check_mod(generation, 2048, 2048, 256, dtype)
    check_mod(generation, 100, 200, 7, dtype)
