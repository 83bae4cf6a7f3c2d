"""The independent truth, in numpy fp64: dense, no pages, no cache, no ranks; shares no code with the rest.

Written from the formulas, another way than the model: keys and values are expanded for every head instead of
absorbed into the query, rotations are products of complex numbers, heads are looped over. Errors here are
plain ``ValueError``, as the family of the rest is not known here.

>>> top_k_fault(np.array([2, 0]), np.array([5.0, 1.0, 5.0]), 2)
>>> top_k_fault(np.array([2, 1]), np.array([5.0, 1.0, 5.0]), 2)
'an unchosen logit, 5.0 of key 0, exceeds a chosen one, 1.0 of key 1'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a model that the weights do not tell."""

    heads: int
    latent: int
    nope: int
    rope: int
    value: int
    index_heads: int
    index_dim: int
    index_rope: int
    top_k: int
    rope_theta: float
    yarn_factor: float
    eps: float

    @classmethod
    def of(cls, shape: Any) -> Sizes:
        """The sizes among the attributes of ``shape``, by name."""
        return cls(*(getattr(shape, field.name) for field in fields(cls)))

    @property
    def sm_scale(self) -> float:
        """Of attention before absorption; YaRN raises it by the square of its mscale."""
        return (1 + math.log(self.yarn_factor) / 10) ** 2 / math.sqrt(self.nope + self.rope)


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """One request from position 0. The rows of the last layer are those asked for, of the others all."""

    hidden: tuple[Array, ...]  # after each layer, [rows, hidden]
    index_logits: tuple[Array, ...]  # of each layer, [rows, tokens]; −inf for keys a row may not see
    kv: tuple[Array, ...]  # of each layer, [tokens, latent + rope]: what a cache holds of the tokens
    index_keys: tuple[Array, ...]  # of each layer, [tokens, index_dim]
    logits: Array  # of the head, [rows asked for, vocab]


def dense_model(
    ids: Sequence[int] | Ints,
    weights: Mapping[str, Floats],
    sizes: Sizes,
    *,
    layers: int,
    chosen: Sequence[Ints] | None = None,
    rows: Sequence[int] | Ints | None = None,
) -> Dense:
    """All ``layers`` over ids [tokens] of one request; row p attends to top-k of the keys 0 … p.

    ``weights`` by the names "embedding", "norm", "head", "layers.0.q_down", …; float32 is widened as needed.
    ``chosen``: for each layer [tokens, k], the positions that each row attends to, −1 for none, instead of
    the oracle's own choice: ties are free (A2), so the choice of a run is judged by
    :func:`worst_top_k_fault` and then taken as it is. ``rows`` [n]: the queries computed in the last layer,
    whose keys are still all tokens. ``ValueError`` for ids outside the vocabulary, and for a choice of no
    key or of one that the row may not see.
    """
    tokens = np.asarray(ids, np.int64)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(weights["embedding"]):
        raise ValueError(f"ids from {tokens.min()} to {tokens.max()} of {len(weights['embedding'])}")
    hidden = weights["embedding"][tokens].astype(np.float64)
    every = np.arange(len(tokens))
    all_hidden, all_index_logits, all_kv, all_index_keys = [], [], [], []
    for i in range(layers):
        asked = every if rows is None or i < layers - 1 else np.asarray(rows, np.int64)
        layer = _Layer(weights, f"layers.{i}.", sizes, hidden, asked)
        index_logits = layer.index_logits()
        choice = _top_k(index_logits, sizes.top_k) if chosen is None else np.asarray(chosen[i])[asked]
        hidden = hidden[asked] + layer.attend(_visible(choice, asked, len(tokens)))
        all_hidden.append(hidden)
        all_index_logits.append(index_logits)
        all_kv.append(layer.kv)
        all_index_keys.append(layer.index_keys)
    return Dense(
        hidden=tuple(all_hidden),
        index_logits=tuple(all_index_logits),
        kv=tuple(all_kv),
        index_keys=tuple(all_index_keys),
        logits=_rms_norm(hidden, weights["norm"], sizes.eps) @ weights["head"].T,
    )


class _Layer:
    """One layer: keys of all rows of ``hidden`` [tokens, …], queries of the rows ``asked`` [rows]."""

    def __init__(
        self, weights: Mapping[str, Floats], prefix: str, sizes: Sizes, hidden: Array, asked: Ints
    ) -> None:
        self.weights, self.prefix, self.sizes, self.asked = weights, prefix, sizes, asked
        self.x = _rms_norm(hidden, self["norm"], sizes.eps)  # [tokens, hidden]
        self.query = _rms_norm(self.x[asked] @ self["q_down"].T, self["q_norm"], sizes.eps)  # [rows, q_rank]
        compressed, places = self.x @ self["kv_down"].T, np.arange(len(hidden))
        latent = _rms_norm(compressed[:, : sizes.latent], self["kv_norm"], sizes.eps)
        k_rope = _rotated(compressed[:, sizes.latent :], places, sizes.rope, sizes.rope_theta)
        self.kv = np.concatenate([latent, k_rope], 1)  # [tokens, latent + rope]
        keys = (
            _layer_norm(self.x @ self["index_k"].T, sizes.eps) * self["index_k_norm"] + self["index_k_bias"]
        )
        self.index_keys = _rotated(keys, places, sizes.index_rope, sizes.rope_theta)  # [tokens, index_dim]

    def __getitem__(self, name: str) -> Floats:
        return self.weights[self.prefix + name]

    def index_logits(self) -> Array:
        """[rows, tokens]: Σ over heads of w · relu(q · k), −inf for keys behind the row."""
        s = self.sizes
        head_weights = self.x[self.asked] @ self["index_weights"].T
        logits = np.zeros((len(self.asked), len(self.x)))
        for head in range(s.index_heads):
            q = _rotated(self.query @ self["index_q"][head].T, self.asked, s.index_rope, s.rope_theta)
            logits += head_weights[:, head, None] * np.maximum(q @ self.index_keys.T, 0)
        logits /= math.sqrt(s.index_heads) * math.sqrt(s.index_dim)
        logits[np.arange(len(self.x)) > self.asked[:, None]] = -np.inf
        return logits

    def attend(self, visible: Bools) -> Array:
        """[rows, hidden]: what attention over the visible keys [rows, tokens] adds to the rows asked for.

        A head at a time: no more than a few [rows, tokens] at once, and one head's part of the weights.
        """
        s = self.sizes
        latent, k_rope = self.kv[:, : s.latent], self.kv[:, s.latent :]
        added = np.zeros((len(self.asked), self.x.shape[1]))
        for head in range(s.heads):
            q = self.query @ self["q_up"][head].T
            q_rope = _rotated(q[:, s.nope :], self.asked, s.rope, s.rope_theta)
            k_nope = latent @ self["k_up"][head].T  # [tokens, nope]
            scores = (q[:, : s.nope] @ k_nope.T + q_rope @ k_rope.T) * s.sm_scale
            values = _softmax(np.where(visible, scores, -np.inf)) @ (latent @ self["v_up"][head].T)
            added += values @ self["out"][:, head * s.value : (head + 1) * s.value].T
        return added


def _top_k(logits: Array, k: int) -> Ints:
    """[rows, min(k, tokens)] keys with the highest logits, −1 where the row sees fewer."""
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return np.where(np.take_along_axis(logits, best, 1) == -np.inf, -1, best)


def _visible(choice: Ints, asked: Ints, tokens: int) -> Bools:
    """[rows, k] positions or −1 → [rows, tokens]: which keys each row attends to."""
    bad = (choice < -1) | (choice > asked[:, None])
    bad[:, :1] |= (choice == -1).all(1, keepdims=True)
    if bad.any():
        row, entry = np.argwhere(bad)[0]
        raise ValueError(f"row at position {asked[row]} attends to {choice[row, entry]}, entry {entry}")
    visible = np.zeros((len(choice), tokens + 1), np.bool_)
    np.put_along_axis(visible, choice, True, 1)  # −1 goes to the extra column
    return visible[:, :-1]


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
    return normed * weight


def _layer_norm(x: Array, eps: float) -> Array:
    centred: Array = x - x.mean(axis=-1, keepdims=True)
    normed: Array = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps)
    return normed


def _rotated(x: Array, positions: Ints, dims: int, theta: float) -> Array:
    """x [rows, …]: the pair of dims (2i, 2i + 1) below ``dims``, as a complex number, times e^(i · angle)."""
    frequencies = [theta ** (-2 * pair / dims) for pair in range(dims // 2)]
    turned = (x[:, 0:dims:2] + 1j * x[:, 1:dims:2]) * np.exp(1j * np.outer(positions, frequencies))
    return np.concatenate([np.stack([turned.real, turned.imag], 2).reshape(len(x), dims), x[:, dims:]], 1)


def _softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
    normed: Array = weights / weights.sum(axis=1, keepdims=True)
    return normed


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
    """Largest absolute difference over the largest expected magnitude; infinite if one is not finite."""
    finite = np.isfinite(actual).all() and np.isfinite(expected).all()
    if actual.shape != expected.shape or not finite:
        return math.inf
    worst = float(np.abs(actual - expected).max(initial=0))
    largest = float(np.abs(expected).max(initial=0))
    return worst / largest if largest else math.inf if worst else 0.0


def top_k_fault(chosen: Ints, logits: Floats, k: int, slack: float = 0.0) -> str | None:
    """What is wrong with the choice of one row under A2, or None. chosen [k] keys or −1, logits [keys].

    No more than k keys: all of them, ascending, whatever their logits. More: any k of them such that no
    unchosen logit exceeds a chosen one by more than ``slack``; ties and order are free, a NaN is a fault.
    """
    if len(chosen) != k:
        return f"{len(chosen)} entries, not {k}"
    want = min(len(logits), k)
    keys = chosen[:want]
    bad = np.flatnonzero(np.concatenate([(keys < 0) | (keys >= len(logits)), chosen[want:] != -1]))
    if bad.size:
        allowed = f"0 … {len(logits) - 1}" if bad[0] < want else "−1"
        return f"entry {bad[0]} is {chosen[bad[0]]}, not {allowed}: a row with {len(logits)} keys has {want}"
    if len(logits) <= k:
        wrong = np.flatnonzero(keys != np.arange(want))
        return f"entry {wrong[0]} is {keys[wrong[0]]}: a short row is ascending" if wrong.size else None
    if len(unique := np.unique(keys)) < want:
        return f"{want - len(unique)} keys are chosen more than once"
    return _threshold_fault(keys, logits, slack)


def _threshold_fault(keys: Ints, logits: Floats, slack: float) -> str | None:
    others = np.setdiff1d(np.arange(len(logits)), keys)
    lowest, highest = keys[np.argmin(logits[keys])], others[np.argmax(logits[others])]  # NaN comes first
    if logits[highest] <= logits[lowest] + slack:
        return None
    return (
        f"an unchosen logit, {float(logits[highest])} of key {highest}, exceeds a chosen one, "
        f"{float(logits[lowest])} of key {lowest}" + (f", by more than {slack:g}" if slack else "")
    )


def worst_top_k_fault(
    chosen: Ints, logits: Floats, lengths: Ints, k: int, slack: float | Floats = 0.0
) -> str | None:
    """:func:`top_k_fault` of the first row that has one, with the row's index in front; None if none has.

    chosen [rows, k], logits [rows, tokens] of which row i sees the first lengths[i], slack one or [rows].
    """
    if chosen.shape != (len(logits), k):
        return f"choices of shape {chosen.shape}, not {(len(logits), k)}"
    slacks = np.broadcast_to(np.asarray(slack, np.float64), len(logits))
    for row in np.flatnonzero(~_lawful(chosen, logits, lengths, slacks)):
        seen = logits[row, : lengths[row]]
        return f"row {row}: {top_k_fault(chosen[row], seen, k, float(slacks[row]))}"
    return None


def _lawful(chosen: Ints, logits: Floats, lengths: Ints, slacks: Floats) -> Bools:
    """[rows]: A2 for all rows at once, another way than row by row."""
    rows, tokens = logits.shape
    entries = np.arange(chosen.shape[1])
    length = lengths[:, None]
    real = entries < length
    fits = np.where(real, (chosen >= 0) & (chosen < length), chosen == -1).all(1)
    picked = np.zeros((rows, tokens + 1), np.bool_)
    np.put_along_axis(picked, np.where(real & (chosen >= 0) & (chosen < length), chosen, tokens), True, 1)
    picked = picked[:, :-1]
    once = picked.sum(1) == real.sum(1)
    ascending = (~real | (chosen == entries)).all(1)
    lowest = np.where(picked, logits, np.inf).min(1, initial=np.inf)
    unchosen = ~picked & (np.arange(tokens) < length)
    highest = np.where(unchosen, logits, -np.inf).max(1, initial=-np.inf)
    short = lengths <= chosen.shape[1]
    verdict: Bools = fits & once & np.where(short, ascending, highest <= lowest + slacks)
    return verdict
