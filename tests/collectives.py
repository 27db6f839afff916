"""Collectives of a program for eight devices, counted; run by test_hlo.py as a program."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from modo import hlo

STEPS, ROWS, WIDTH = 5, 16, 32


def main():
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    spec = PartitionSpec("y")

    def body(carry, _):
        part = carry  # [ROWS / 4, WIDTH] of each device
        whole = lax.all_gather(part, "y", tiled=True)
        part += lax.psum_scatter(jnp.sin(whole), "y", tiled=True)
        part += lax.psum(part * 2, "x")
        part = lax.all_to_all(part, "y", split_axis=1, concat_axis=1, tiled=True)
        return lax.ppermute(part, "y", [(i, (i + 1) % 4) for i in range(4)]), None

    def program(x):
        return lax.scan(body, x, length=STEPS)[0] + lax.psum(x, ("x", "y"))

    sharded = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, spec))
    module = hlo.parse(jax.jit(sharded).lower(x).compile().as_text())
    sent = {}
    for c in hlo.collectives(module, len(jax.devices())):
        sent[c.kind] = sent.get(c.kind, 0) + c.times * c.sent_bytes
    part = ROWS // 4 * WIDTH * 4
    assert hlo.executions(module).unknown_loops == 0
    assert sent == {
        "all-gather": STEPS * 3 * part,
        "reduce-scatter": STEPS * 3 * part,
        "all-reduce": STEPS * part + 2 * part * 7 / 8,
        "all-to-all": STEPS * part * 3 / 4,
        "collective-permute": STEPS * part,
    }, sent


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    main()
