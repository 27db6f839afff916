import jax.numpy as jnp

from tests.kernels.tpu_compilation import MILLION, make_tests

BF16 = jnp.bfloat16

test_compiles, test_mod_compiles = make_tests(
    ("v6e", "tpu7x"),
    [
        ("v6e", 32768, 2, 1, 128, 128, 8, BF16, False, None),
        ("tpu7x", 8192, 2, 1, 64, 512, 3, BF16, True, None),
        ("v6e", 131072, 2, 1, 128, 512, 4, BF16, False, "grouped"),
        ("v5p", MILLION, 8, 1, 128, 4096, 12, BF16, False, "grouped"),
    ],
)
