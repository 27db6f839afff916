"""Rows out and back in, every implementation; the Pallas kernels are interpreted."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas import mod
from kernels_pallas.mod import tpu
from modo.nn import MixtureOfDepths

EPS = 1e-3
# name: B, T, D, C, filled slots of each batch row
SHAPES = {
    "odd_width": (3, 40, 200, 21, (21, 13, 0)),
    "one_slot": (1, 6, 24, 1, (1,)),
    "all_tokens": (1, 35, 16, 35, (35,)),
}
PALLAS_CASES = [
    ("pallas_tpu", "odd_width", "float32"),
    ("pallas_tpu", "odd_width", "bfloat16"),
    ("pallas_tpu", "one_slot", "float32"),
    ("pallas_tpu", "all_tokens", "bfloat16"),
    ("pallas_gpu", "odd_width", "bfloat16"),
    ("pallas_gpu", "one_slot", "float32"),
    ("pallas_gpu", "all_tokens", "float32"),
]
CASES = [("xla", shape, dtype) for shape in SHAPES for dtype in ("float32", "bfloat16")]
CASES += PALLAS_CASES


@functools.cache
def inputs(name: str, dtype: str) -> dict:
    """Values whose products with the gates are exact; rubbish wherever nothing may look."""
    B, T, D, C, filled = SHAPES[name]
    rng = np.random.default_rng(0)
    index_BC, mask_BT = np.full((B, C), T - 1, np.int32), np.zeros((B, T), bool)
    for b, n in enumerate(filled):
        index_BC[b, :n] = np.sort(rng.choice(T, n, replace=False))
        mask_BT[b, index_BC[b, :n]] = True
    filled_BC = np.arange(C) < np.asarray(filled)[:, None]

    def normal(*shape):
        return np.round(16 * rng.normal(size=shape)) / 16

    x_BTD, delta_BCD = normal(B, T, D), normal(B, C, D)
    x_BTD[~mask_BT] = np.where(rng.random((np.sum(~mask_BT), D)) < 0.5, np.nan, -0.0)
    delta_BCD[~filled_BC] = np.nan
    arrays = {
        "x": jnp.asarray(x_BTD, dtype),
        "delta": jnp.asarray(delta_BCD, dtype),
        "gate": jnp.asarray(np.where(filled_BC, np.round(4 * rng.normal(size=(B, C))) / 4, 0)),
        "scale": jnp.asarray(1 + normal(D) / 4),
        "dy": jnp.asarray(normal(B, T, D), dtype),
        "drows": jnp.asarray(np.where(filled_BC[..., None], normal(B, C, D), np.nan), dtype),
        "index": jnp.asarray(index_BC),
        "filled": jnp.asarray(filled_BC),
    }
    return {k: v.astype(jnp.float32) if v.dtype == jnp.float64 else v for k, v in arrays.items()}


@functools.cache
def compiled(implementation: str):
    """Both operations, and the gradients of all that they take."""

    @jax.jit
    def both(x, delta, gate, scale, dy, drows, index, filled):
        y, back = jax.vjp(
            lambda *a: mod.combine(*a, index, filled, implementation=implementation), x, delta, gate
        )
        rows, back_rows = jax.vjp(
            lambda x: mod.dispatch(x, index, filled, implementation=implementation), x
        )
        normed, back_normed = jax.vjp(
            lambda x, s: mod.dispatch(
                x, index, filled, norm_scale_D=s, eps=EPS, implementation=implementation
            ),
            x,
            scale,
        )
        names = ("y", "dx", "d_delta", "d_gate", "rows", "drows", "normed", "dnormed", "d_scale")
        values = (y, *back(dy), rows, *back_rows(drows), normed, *back_normed(drows))
        return dict(zip(names, values, strict=True))

    return both


@functools.cache
def run(implementation: str, name: str, dtype: str) -> dict:
    # A loop unrolled less compiles faster; the test of races has it in full.
    with mock.patch.object(tpu, "_UNROLL", 2):
        return compiled(implementation)(**inputs(name, dtype))


def expected(name: str, dtype: str) -> dict:
    """In float64, by loops over slots."""
    args = inputs(name, dtype)
    a = {k: np.asarray(v) for k, v in args.items()}
    a = {k: v if k in ("index", "filled") else v.astype(np.float64) for k, v in a.items()}
    scale = np.asarray(args["scale"].astype(dtype)).astype(np.float64)
    B, C = a["index"].shape
    out = {"y": a["x"].copy(), "dx": a["dy"], "d_gate": np.zeros((B, C))}
    out |= {key: np.zeros(a["delta"].shape) for key in ("rows", "normed", "d_delta")}
    out |= {key: np.zeros(a["x"].shape) for key in ("drows", "dnormed")}
    out["d_scale"] = np.zeros(a["scale"].shape)
    for b, c in zip(*np.nonzero(a["filled"]), strict=True):
        t = a["index"][b, c]
        row, dy, gate, delta = a["x"][b, t], a["dy"][b, t], a["gate"][b, c], a["delta"][b, c]
        out["y"][b, t] = row + gate * delta
        out["d_delta"][b, c], out["d_gate"][b, c] = gate * dy, delta @ dy
        out["rows"][b, c], out["drows"][b, t] = row, a["drows"][b, c]
        inverse = (np.mean(row**2) + EPS) ** -0.5
        out["normed"][b, c] = row * inverse * scale
        d = a["drows"][b, c] * scale
        out["dnormed"][b, t] = inverse * d - row * inverse**3 * np.mean(d * row)
        out["d_scale"] += a["drows"][b, c] * row * inverse
    return out


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint16)


@pytest.mark.parametrize(("implementation", "name", "dtype"), CASES)
def test_values_and_gradients(implementation, name, dtype):
    actual, reference = run(implementation, name, dtype), expected(name, dtype)
    assert actual.keys() == reference.keys()
    tolerance = 2e-6 if dtype == "float32" else 1e-2
    for key, value in actual.items():
        wide = key in ("d_gate", "d_scale")
        assert value.dtype == (jnp.float32 if wide else dtype), key
        value = np.asarray(value).astype(np.float64)
        if key == "d_gate":  # 0 * NaN of an unfilled slot goes nowhere
            value = np.where(inputs(name, dtype)["filled"], value, 0)
        largest = np.nanmax(np.abs(reference[key]))
        np.testing.assert_allclose(
            value, reference[key], rtol=tolerance, atol=tolerance * largest, err_msg=key
        )


@pytest.mark.parametrize(("implementation", "name", "dtype"), PALLAS_CASES)
def test_kernels_agree_bitwise_with_xla(implementation, name, dtype):
    actual, xla = run(implementation, name, dtype), run("xla", name, dtype)
    for key in ("y", "dx", "d_delta", "rows", "drows"):
        zero_sign = key == "drows"  # -0 added to 0 is 0
        a, e = (x + 0 if zero_sign else x for x in (actual[key], xla[key]))
        filled = np.asarray(inputs(name, dtype)["filled"])
        a, e = (bits(x)[filled] if key == "d_delta" else bits(x) for x in (a, e))
        np.testing.assert_array_equal(a, e, err_msg=key)
    again = compiled(implementation)(**inputs(name, dtype))
    for key, value in again.items():
        np.testing.assert_array_equal(bits(value), bits(actual[key]), err_msg=key)


@pytest.mark.parametrize(("implementation", "name", "dtype"), CASES)
def test_other_rows_come_back_bitwise(implementation, name, dtype):
    args = inputs(name, dtype)
    y_BTD, x_BTD = run(implementation, name, dtype)["y"], args["x"]
    mask_BT = np.zeros(x_BTD.shape[:2], bool)
    for b, c in zip(*np.nonzero(np.asarray(args["filled"])), strict=True):
        mask_BT[b, args["index"][b, c]] = True
    np.testing.assert_array_equal(bits(y_BTD)[~mask_BT], bits(x_BTD)[~mask_BT])


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize(("batch", "scale_axis"), [(3, 0), (1, None)])
def test_vmap(implementation, batch, scale_axis):
    """Two models, each with rows and slots of its own, and a norm of its own or the same one."""
    args = inputs("odd_width", "float32")
    x, index, filled = (args[name][:batch] for name in ("x", "index", "filled"))
    x, index, filled = jax.tree.map(
        lambda a: jnp.stack([a, a[::-1]]), (x[..., :24], index[:, :5], filled[:, :5])
    )
    scale = args["scale"][:48].reshape(2, 24)
    scale = scale if scale_axis == 0 else scale[0]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, *args):
        def rows_and_gradients(x, scale, index, filled):
            def rows(x, scale):
                options = {"norm_scale_D": scale, "implementation": implementation}
                return mod.dispatch(x, index, filled, **options)

            out, back = jax.vjp(rows, x, scale)
            return out, back(jnp.ones_like(out))

        return jax.vmap(rows_and_gradients, (0, scale_axis, 0, 0))(*args)

    with mock.patch.object(tpu, "_UNROLL", 1):
        actual = run(implementation, x, scale, index, filled)
    expected = run("xla", x, scale, index, filled)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_race(dtype, capfd):
    """Several chunks, and pairs of rows across their borders."""
    x, delta, gate, index, filled = (
        inputs("all_tokens", dtype)[k] for k in ("x", "delta", "gate", "index", "filled")
    )
    # Without row 15: one chunk ends with a row whose pair the next one begins with.
    index, filled = (jnp.delete(a, 15, axis=1) for a in (index, filled))
    delta, gate = delta[:, 1:], gate[:, 1:]
    params = pltpu.InterpretParams(detect_races=True)
    expected_y = mod.combine(x, delta, gate, index, filled, implementation="xla")
    expected_rows = mod.dispatch(x, index, filled, implementation="xla")
    with mock.patch.object(tpu, "_MAX_SLOTS", 16):
        y = tpu.combine(x, delta, gate, index, filled, interpret=params)
        rows = tpu.dispatch(0.0, x, index, filled, None, interpret=params)
    np.testing.assert_array_equal(bits(y), bits(expected_y))
    np.testing.assert_array_equal(bits(rows), bits(expected_rows))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_for_cuda(dtype):
    args = inputs("odd_width", dtype)

    def both(x, delta, gate, scale, dy, drows, index, filled):
        options = {"implementation": "pallas_gpu"}
        y, back = jax.vjp(lambda *a: mod.combine(*a, index, filled, **options), x, delta, gate)
        rows, back_rows = jax.vjp(
            lambda x, s: mod.dispatch(x, index, filled, norm_scale_D=s, **options), x, scale
        )
        return y, back(dy), rows, back_rows(drows)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(both).trace(**args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("mod_combine") >= 2 and text.count("mod_dispatch") >= 3


def test_a_model_on_cpu_gets_xla():
    layer = MixtureOfDepths(lambda x_BCD, **_: x_BCD, 8, rngs=nnx.Rngs(0))
    text = str(jax.make_jaxpr(lambda x: layer(x)[0])(jnp.ones((1, 16, 8))))
    assert "pallas" not in text and "scatter-add" in text


def test_refuses():
    x, index, filled = jnp.ones((2, 8, 4)), jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="'cuda' is none of 'xla'"):
        mod.dispatch(x, index, filled, implementation="cuda")
    with pytest.raises(ValueError, match="float16"):
        mod.dispatch(x.astype(jnp.float16), index, filled, implementation="pallas_tpu")
    with pytest.raises(ValueError, match=r"index \(3, 3\)"):
        mod.dispatch(x, jnp.zeros((3, 3), jnp.int32), filled)
    with pytest.raises(ValueError, match="same shape"):
        mod.dispatch(x, index, filled[:, 1:])
    with pytest.raises(ValueError, match=r"must be \(4,\), got \(5,\)"):
        mod.dispatch(x, index, filled, norm_scale_D=jnp.ones(5))
    with pytest.raises(ValueError, match=r"\(2, 3, 4\), got \(2, 3, 5\)"):
        mod.combine(x, jnp.ones((2, 3, 5)), None, index, filled)
    with pytest.raises(ValueError, match=r"\(2, 3\), got \(2,\)"):
        mod.combine(x, jnp.ones((2, 3, 4)), jnp.ones(2), index, filled)
    with pytest.raises(ValueError, match="empty"):
        mod.dispatch(x[:, :0], index, filled)


@pytest.mark.quick
def test_default_combine_is_the_kernel_on_a_tpu_alone():
    x = jax.ShapeDtypeStruct((2, 16, 128), jnp.float32)
    delta, gate = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 3, 128), (2, 3)))
    index, filled = (jax.ShapeDtypeStruct((2, 3), dtype) for dtype in (jnp.int32, bool))

    def kernels(platform, dtype=jnp.float32):
        args = jax.ShapeDtypeStruct(x.shape, dtype), delta, gate, index, filled
        lowered = jax.jit(mod.combine).trace(*args).lower(lowering_platforms=(platform,))
        return lowered.as_text().count("@tpu_custom_call")

    assert (kernels("tpu"), kernels("cpu"), kernels("tpu", jnp.float16)) == (1, 0, 0)


def test_default_combine_has_the_gradients_of_the_xla_form():
    rng = np.random.default_rng(0)
    x, delta, gate = (rng.normal(size=s).astype(np.float32) for s in ((2, 9, 5), (2, 4, 5), (2, 4)))
    index = jnp.asarray([[0, 2, 5, 0], [1, 2, 3, 8]], jnp.int32)
    filled = jnp.asarray([[True, True, True, False], [True] * 4])
    for gates in (gate, None):

        def loss(x, delta, gate, implementation, gates=gates):
            gate = gate if gates is not None else None
            y = mod.combine(x, delta, gate, index, filled, implementation=implementation)
            return jnp.sum(y**3)

        results = [
            jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnums=3)(x, delta, gate, name)
            for name in (None, "xla")
        ]
        for a, e in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-6)
