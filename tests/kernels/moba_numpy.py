"""MoBA one token at a time in NumPy float64, with its gradient."""

import numpy as np


def block_bounds(segments_T, block_size):
    """For each token: first token of its run, first token of its own block."""
    begin, bounds = 0, []
    for t in range(len(segments_T)):
        if t and segments_T[t] != segments_T[t - 1]:
            begin = t
        bounds.append((begin, begin + (t - begin) // block_size * block_size))
    return bounds


def moba(q, k, v, do, *, block_size, top_k, scale, segments=None, soft_cap=None, sinks=0, window=0):
    """Returns out, (dq, dk, dv), starts of chosen blocks {(b, t, n): best first}, gap [B, T, N].

    gap is the score of the last chosen block less that of the first left out, infinite where there
    is none.
    """
    q, k, v, do = (np.asarray(x).astype(np.float64) for x in (q, k, v, do))
    B, T, N, _ = q.shape
    G = N // k.shape[2]
    out = np.zeros((B, T, N, v.shape[3]))
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    chosen, gap = {}, np.full((B, T, N), np.inf)
    segments = np.ones((B, T), int) if segments is None else np.asarray(segments)
    for b in range(B):
        bounds = block_bounds(segments[b], block_size)
        for t in range(T):
            begin, own = bounds[t]
            for n in range(N):
                chosen[b, t, n] = []
                if segments[b, t] == 0:
                    continue
                starts = list(range(begin, own, block_size))
                score = np.array(
                    [q[b, t, n] @ k[b, s : s + block_size, n // G].mean(0) for s in starts]
                )
                score[:sinks] = np.inf
                score[max(len(starts) - window, 0) :] = np.inf
                order = np.argsort(-score, kind="stable")
                if 1 <= top_k - 1 < len(starts):
                    gap[b, t, n] = score[order[top_k - 2]] - score[order[top_k - 1]]
                chosen[b, t, n] = [starts[i] for i in order[: top_k - 1]]
                keys = [np.arange(s, s + block_size) for s in chosen[b, t, n]]
                keys = np.concatenate([*keys, np.arange(own, t + 1)]).astype(int)
                kk, vv = k[b, keys, n // G], v[b, keys, n // G]
                s = kk @ q[b, t, n] * scale
                slope = np.full_like(s, scale)
                if soft_cap is not None:
                    s = soft_cap * np.tanh(s / soft_cap)
                    slope = scale * (1 - (s / soft_cap) ** 2)
                p = np.exp(s - s.max())
                p /= p.sum()
                out[b, t, n] = p @ vv
                dp = vv @ do[b, t, n]
                ds = p * (dp - p @ dp) * slope
                dq[b, t, n] = ds @ kk
                # Keys of one row are distinct, so plain indexed addition is right.
                dk[b, keys, n // G] += np.outer(ds, q[b, t, n])
                dv[b, keys, n // G] += np.outer(p, do[b, t, n])
    return out, (dq, dk, dv), chosen, gap
