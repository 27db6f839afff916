"""MoBA against dense causal attention on a CPU, forward and backward, one process, alternating.

python -m benchmarks.moba_cpu [--lengths 1024 2048 ...] [--heads 2 --width 64] [--json FILE]

The dense side is the faster of two: attention in tiles of the lower triangle only, with an online
softmax and its own recomputing backward pass (below), and, where T x T scores fit,
jax.nn.dot_product_attention. The limit is the ratio of the products that the two methods need:
dense attention's lower triangle over MoBA's attended keys and its scores of blocks.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

import modo
from kernels_pallas.moba import plan

SETTINGS = ((512, 3), (128, 8))
# jax.nn.dot_product_attention keeps several T x T arrays a head.
_LONGEST_FULL = 8192
_TILE = 512


def _tile_of(x_NTH, i, tile):
    return lax.dynamic_slice_in_dim(x_NTH, i * tile, tile, 1)


def _scores(q, k, diagonal: bool):
    s = jnp.einsum("nqh,nlh->nql", q, k)
    if diagonal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[1:], bool)), s, -jnp.inf)
    return s


def _dense_forward(q_NTH, k_NTH, v_NTH):
    N, T, H = q_NTH.shape
    tile = min(_TILE, T)
    q_NTH = q_NTH * H**-0.5

    def rows(i):
        q = _tile_of(q_NTH, i, tile)

        def add(j, part, diagonal=False):
            o, top, total = part
            s = _scores(q, _tile_of(k_NTH, j, tile), diagonal)
            new = jnp.maximum(top, jnp.max(s, axis=-1))
            p = jnp.exp(s - new[..., None])
            fade = jnp.exp(top - new)
            o = o * fade[..., None] + jnp.einsum("nql,nlh->nqh", p, _tile_of(v_NTH, j, tile))
            return o, new, total * fade + jnp.sum(p, axis=-1)

        empty = jnp.zeros((N, tile, H)), jnp.full((N, tile), -jnp.inf), jnp.zeros((N, tile))
        o, top, total = add(i, lax.fori_loop(0, i, add, empty), diagonal=True)
        return o / total[..., None], top + jnp.log(total)

    o, lse = lax.map(rows, jnp.arange(T // tile))
    return jnp.swapaxes(o, 0, 1).reshape(N, T, H), jnp.swapaxes(lse, 0, 1).reshape(N, T)


@jax.custom_vjp
def dense_attention(q_NTH, k_NTH, v_NTH):
    """Causal attention of N heads in tiles, float32; T must be a multiple of the tile."""
    return _dense_forward(q_NTH, k_NTH, v_NTH)[0]


def _dense_vjp_forward(q_NTH, k_NTH, v_NTH):
    o_NTH, lse_NT = _dense_forward(q_NTH, k_NTH, v_NTH)
    return o_NTH, (q_NTH, k_NTH, v_NTH, o_NTH, lse_NT)


def _dense_vjp_backward(saved, do_NTH):
    q_NTH, k_NTH, v_NTH, o_NTH, lse_NT = saved
    N, T, H = q_NTH.shape
    tile = min(_TILE, T)
    scale = H**-0.5
    q_NTH = q_NTH * scale
    delta_NT = jnp.sum(do_NTH * o_NTH, axis=-1)

    def keys(dq_NTH, j):
        k, v = _tile_of(k_NTH, j, tile), _tile_of(v_NTH, j, tile)

        def add(i, sums, diagonal=False):
            dq_NTH, dk, dv = sums
            q, do = _tile_of(q_NTH, i, tile), _tile_of(do_NTH, i, tile)
            p = jnp.exp(_scores(q, k, diagonal) - _tile_of(lse_NT, i, tile)[..., None])
            dv = dv + jnp.einsum("nql,nqh->nlh", p, do)
            dp = jnp.einsum("nqh,nlh->nql", do, v)
            ds = p * (dp - _tile_of(delta_NT, i, tile)[..., None])
            dq = _tile_of(dq_NTH, i, tile) + jnp.einsum("nql,nlh->nqh", ds, k)
            dq_NTH = lax.dynamic_update_slice_in_dim(dq_NTH, dq, i * tile, 1)
            return dq_NTH, dk + jnp.einsum("nql,nqh->nlh", ds, q), dv

        sums = add(j, (dq_NTH, jnp.zeros_like(k), jnp.zeros_like(v)), diagonal=True)
        dq_NTH, dk, dv = lax.fori_loop(j + 1, T // tile, add, sums)
        return dq_NTH, (dk, dv)

    dq_NTH, parts = lax.scan(keys, jnp.zeros_like(q_NTH), jnp.arange(T // tile))
    dk_NTH, dv_NTH = (jnp.swapaxes(x, 0, 1).reshape(N, T, H) for x in parts)
    return dq_NTH * scale, dk_NTH, dv_NTH


dense_attention.defvjp(_dense_vjp_forward, _dense_vjp_backward)


def _tiled(q, k, v):
    o = jax.vmap(dense_attention)(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)))
    return jnp.swapaxes(o, 1, 2)


def _full(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _moba(q, k, v, *, block_size, top_k):
    return modo.moba_attention(q, k, v, block_size=block_size, top_k=top_k, implementation="xla")


class Subject:
    """One kind of attention, forward alone and with its backward pass, compiled and run once.

    Args:
      calls: one behind another that a time is taken of.
    """

    def __init__(self, attend, args, calls):
        self._args, self._calls = args, calls
        self._forward = jax.jit(attend)
        self._both = jax.jit(jax.grad(lambda *x: jnp.sum(attend(*x) * x[0]), (0, 1, 2)))
        self.seconds(backward=False)
        self.seconds(backward=True)

    def seconds(self, *, backward: bool) -> float:
        function = self._both if backward else self._forward
        start = time.perf_counter()
        for _ in range(self._calls):
            jax.block_until_ready(function(*self._args))
        return (time.perf_counter() - start) / self._calls


def limits(length: int, block_size: int, top_k: int) -> tuple[float, float]:
    """FLOPs of dense attention over MoBA's: of the forward pass, and of both passes."""
    blocks = plan.num_candidates(length, block_size)
    whole, rest = divmod(length, block_size)
    own = whole * block_size * (block_size + 1) // 2 + rest * (rest + 1) // 2
    chosen = plan.max_pairs(length, block_size, min(top_k - 1, blocks)) * block_size
    dense = length * (length + 1) // 2
    # Products a pair of query and key: 2 forward, 5 backward; the score of a block is one.
    scores = 0 if top_k - 1 >= blocks else length * blocks
    return tuple(n * dense / (n * (own + chosen) + scores) for n in (2, 7))


def measure(length: int, heads: int, width: int, repeats: int) -> list[dict]:
    """One row a setting; a speed-up is the median over rounds of dense time / MoBA time."""
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(key, (1, length, heads, width)) for key in keys]
    calls = max(1, (8192 // length) ** 2)
    dense = {"tiled": Subject(_tiled, args, calls)}
    if length <= _LONGEST_FULL:
        dense["jax.nn"] = Subject(_full, args, calls)
    sparse = {
        (B, k): Subject(functools.partial(_moba, block_size=B, top_k=k), args, calls)
        for B, k in SETTINGS
    }
    times = {}
    for _ in range(repeats):
        for subjects in (dense, sparse):
            for name, subject in subjects.items():
                for backward in (False, True):
                    seconds = subject.seconds(backward=backward)
                    times.setdefault((name, backward), []).append(seconds)
    rows = []
    for block_size, top_k in SETTINGS:
        row = {"length": length, "block_size": block_size, "top_k": top_k}
        for backward, name in ((False, "forward_"), (True, "")):
            fastest = min(dense, key=lambda kind: statistics.median(times[kind, backward]))
            pairs = zip(times[fastest, backward], times[(block_size, top_k), backward], strict=True)
            row |= {
                f"{name}speedup": statistics.median(a / b for a, b in pairs),
                f"{name}limit": limits(length, block_size, top_k)[backward],
                f"{name}dense": fastest,
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lengths = [1024 << i for i in range(6)]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    for length in options.lengths:
        if length < 1 or length % min(_TILE, length):
            parser.error(f"a length must be below {_TILE} or a multiple of it, got {length}")
    print(f"1 x T x {options.heads} heads of {options.width}, float32, {jax.devices()[0]}")
    print(f"{'T':>7}{'B':>5}{'k':>3}{'both':>9}{'limit':>8}{'forward':>9}{'limit':>8}  dense")
    rows = []
    for length in options.lengths:
        for row in measure(length, options.heads, options.width, options.repeats):
            rows.append(row)
            print(
                f"{length:>7}{row['block_size']:>5}{row['top_k']:>3}{row['speedup']:>9.2f}"
                f"{row['limit']:>8.2f}{row['forward_speedup']:>9.2f}{row['forward_limit']:>8.2f}"
                f"  {row['dense']}, {row['forward_dense']}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
