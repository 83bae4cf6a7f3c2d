"""The independent truth, in numpy fp64: dense, no pages, no cache, no ranks; shares no code with the rest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def causal_mla(q: Array, kv: Array, prefix: int, *, latent: int, sm_scale: float) -> Array:
    """One request, row by row: q [tokens, heads, width] from position prefix on, kv [≥ end, width].

    Returns [tokens, heads, latent]. The token at position p attends to kv[0 … p].
    """
    out = np.empty((q.shape[0], q.shape[1], latent))
    for row in range(q.shape[0]):
        keys = kv[: prefix + row + 1]
        scores = q[row] @ keys.T * sm_scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[row] = (weights / weights.sum(axis=1, keepdims=True)) @ keys[:, :latent]
    return out


def relative_error(actual: Array, expected: Array) -> float:
    """Largest absolute difference over the largest expected magnitude; infinite when a NaN is about."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    error = float(np.abs(actual - expected).max() / np.abs(expected).max())
    return error if np.isfinite(error) else float("inf")
