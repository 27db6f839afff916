"""TPU kernels compiled, by libtpu, for each generation of TPU: no TPU is needed.

libtpu may compile in one thread of a process only, so generations are shared out over test files.
"""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import moba, mod
from kernels_pallas.moba import plan
from kernels_pallas.tpu_topology import one_chip

MILLION = 1 << 20
# What every generation compiles: T, query heads, key heads, head width, block_size, top_k, dtype,
# documents, path; None: the dense path, by its rule
CASES = (
    (8192, 4, 1, 128, 512, 3, jnp.bfloat16, False, None),
    (16384, 2, 1, 64, 128, 8, jnp.bfloat16, False, None),
    (8192, 4, 1, 128, 512, 3, jnp.bfloat16, False, "grouped"),
    (4096, 2, 1, 64, 128, 8, jnp.float32, True, "grouped"),
    (4096, 2, 2, 256, 512, 3, jnp.bfloat16, False, "grouped"),
    (32768, 1, 1, 128, 4096, 3, jnp.bfloat16, False, "grouped"),
)


def compile_case(generation, T, N, K, H, block_size, top_k, dtype, documents):
    """The forward and backward pass compiled for one chip."""
    sharding = one_chip(generation)

    def both(q, k, v, do, segment_ids):
        def f(q, k, v):
            return moba.moba_attention(
                q,
                k,
                v,
                block_size=block_size,
                top_k=top_k,
                segment_ids=segment_ids,
                implementation="pallas_tpu",
            )

        out, vjp = jax.vjp(f, q, k, v)
        return out, vjp(do)

    q, k = (jax.ShapeDtypeStruct((1, T, heads, H), dtype) for heads in (N, K))
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32) if documents else None
    jitted = jax.jit(both, in_shardings=sharding, out_shardings=sharding)
    return jitted.lower(q, k, k, q, ids).compile()


def check_case(generation, T, N, K, H, block_size, top_k, dtype, documents, path):
    forced = functools.partial(plan.make_call, path=path)
    with mock.patch.object(plan, "make_call", forced):
        executable = compile_case(generation, T, N, K, H, block_size, top_k, dtype, documents)
    text = executable.as_text()
    kernels = ("interval", "tiles") if path == "grouped" else ("dense",)
    found = set(re.findall(r"moba_([a-z]+_(?:forward|backward))", text))
    assert found == {f"{kernel}_{part}" for kernel in kernels for part in ("forward", "backward")}
    assert "moba_choose" in text
    assert f"[{T},{T}]" not in text
    memory = executable.memory_analysis()
    if T == MILLION:
        size = memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert memory.temp_size_in_bytes < 2 * size


def check_mod(generation, T, D, C, dtype):
    """Rows in, and out normalised, with all gradients; nothing but the kernels touches x."""
    sharding, B = one_chip(generation), 2

    def combine(x, delta, gate, index, filled):
        return mod.combine(x, delta, gate, index, filled, implementation="pallas_tpu")

    def gradients(x, delta, gate, scale, index, filled):
        def both(x, delta, gate, scale):
            y = combine(x, delta, gate, index, filled)
            rows = mod.dispatch(y, index, filled, norm_scale_D=scale, implementation="pallas_tpu")
            return jnp.sum(rows.astype(jnp.float32) ** 2)

        return jax.grad(both, (0, 1, 2, 3))(x, delta, gate, scale)

    x, delta = (jax.ShapeDtypeStruct((B, length, D), dtype) for length in (T, C))
    gate, index, filled = (
        jax.ShapeDtypeStruct((B, C), kind) for kind in (jnp.float32, jnp.int32, bool)
    )
    scale = jax.ShapeDtypeStruct((D,), jnp.float32)
    jitted = jax.jit(combine, in_shardings=sharding, out_shardings=sharding, donate_argnums=0)
    executable = jitted.lower(x, delta, gate, index, filled).compile()
    text, size = executable.as_text(), B * T * D * x.dtype.itemsize
    assert executable.memory_analysis().alias_size_in_bytes >= size
    if T % 8 == 0:  # XLA turns the axes of other arrays round.
        assert executable.memory_analysis().temp_size_in_bytes < size / 8
        assert not re.search(rf"\[{B},{T},{D}\]\S* copy", text)
    jitted = jax.jit(gradients, in_shardings=sharding, out_shardings=sharding)
    text = jitted.lower(x, delta, gate, scale, index, filled).compile().as_text()
    assert "mod_combine" in text and "mod_dispatch" in text


def make_tests(generations: tuple[str, ...], more: list[tuple]):
    """A file's test_compiles and test_mod_compiles; more: cases, each after its generation."""
    cases = [(generation, *case) for case in CASES for generation in generations]

    @pytest.mark.parametrize(
        "case", cases + more, ids=lambda case: "-".join(map(str, (*case[:7], *case[9:])))
    )
    def test_compiles(case):
        check_case(*case)

    @pytest.mark.parametrize("generation", generations)
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_mod_compiles(generation, dtype):
        check_mod(generation, 2048, 2048, 256, dtype)
        check_mod(generation, 100, 200, 7, dtype)

    return test_compiles, test_mod_compiles
