"""Rows that a tiny model computes, in fp64: outputs and views are compared with the oracle (laws A5, V1).

The KV of a token is a function of the tokens before it, so requests may share pages as they do with
identities. Every row attends to all its keys: which of two equal ones is chosen is free, and would change the
rows behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from refmodel.errors import Finding, Where
from refmodel.model.batch import batch_rows
from refmodel.model.decoding import decode
from refmodel.model.forward import Output, forward
from refmodel.model.model import build_model
from refmodel.model.shape import TINY
from refmodel.model.weights import arrays, seeded_weights
from refmodel.oracle import Array, Dense, Sizes, dense_model, relative_error
from refmodel.precision import FP64_BUDGET
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage
from sim.engine.held import Held
from sim.engine.read import Read
from sim.engine.truth import Ids
from sim.engine.turn import Turn


class ModelRows:
    """The rows of a rank as a model computes them."""

    def __init__(self, layers: int, most_keys: int) -> None:
        self.shape = replace(TINY, layers=layers, top_k=most_keys)
        self.model = build_model(seeded_weights(self.shape, seed=0), "f64")
        self.formats = dict(self.model.formats)
        self._oracle = arrays(self.model.weights)

    def serve(self, passage: Passage, turns: Sequence[Turn], read: Read) -> Iterator[torch.Tensor]:
        """One forward of the model; the views of its layers, if it has any, then the new tokens' outputs."""
        ids = torch.cat([self._tokens(turn.ids[turn.extent.prefix : turn.extent.end]) for turn in turns])
        batch = batch_rows(passage, ids, self.model.device)
        output = forward(read.group, self.model, batch, read.layers, ready=read.before_layer)
        for trace in output.layers:
            yield from trace.views.values()
        yield output.hidden
        read.findings.extend(self._compare_output(output, turns))

    def append(self, held: Held) -> Iterator[Finding]:
        """Compute the last token on decode, from decode's rows alone (T5)."""
        ids = self._tokens(held.ids)
        hidden = decode(self.model, ids[-1:], held.slots, held.layers)
        error = relative_error(hidden.numpy(), self._exact(ids).hidden[-1][-1:])
        if not error <= FP64_BUDGET:
            where = Where(rank=held.rank, request=held.name, position=len(ids) - 1)
            yield Finding(
                "T5", "relative error of decode's output", f"<= {FP64_BUDGET}", f"{error:.3g}", where
            )

    def compare(self, held: Held) -> Iterator[Finding]:
        """Where decode's rows are not those that the oracle computes from the tokens (T5)."""
        exact = self._exact(self._tokens(held.ids))
        for layer in range(self.shape.layers):
            for cache in self.formats:
                rows = self._values(cache, held.packed(layer, cache)).numpy()
                truth = _rows_of(exact, cache)[layer]
                if not relative_error(rows, truth) <= FP64_BUDGET:
                    yield _wrong_on_decode(rows, truth, held.where(layer, cache))

    def _tokens(self, ids: Ids) -> torch.Tensor:
        return torch.from_numpy((ids % self.shape.vocab).astype("int64"))

    def _exact(self, ids: torch.Tensor) -> Dense:
        return dense_model(ids.numpy(), self._oracle, Sizes.of(self.shape), layers=self.shape.layers)

    def _compare_output(self, output: Output, turns: Sequence[Turn]) -> Iterator[Finding]:
        """Views (V1) and outputs (A5) beside what the oracle computes from the tokens."""
        hidden = output.hidden.split([turn.extent.tokens for turn in turns])
        ends = [turn.extent.end for turn in turns]
        views = [
            {cache: self._values(cache, view).split(ends) for cache, view in trace.views.items()}
            for trace in output.layers
        ]
        for i, turn in enumerate(turns):
            exact = self._exact(self._tokens(turn.ids[: turn.extent.end]))
            for layer, of_layer in enumerate(views):
                for cache, parts in of_layer.items():
                    where = Where(request=turn.name, layer=layer, cache=cache.name.lower())
                    yield from _compare("V1", "the view", parts[i], _rows_of(exact, cache)[layer], where)
            new = exact.hidden[-1][turn.extent.prefix :]
            yield from _compare("A5", "the output", hidden[i], new, Where(request=turn.name))

    def _values(self, cache: Cache, packed: torch.Tensor) -> torch.Tensor:
        return self.formats[cache].unpack(packed)


def _rows_of(exact: Dense, cache: Cache) -> tuple[Array, ...]:
    """What a cache holds of a request, layer by layer."""
    return exact.kv if cache is Cache.KV else exact.index_keys


def _compare(law: str, what: str, rows: torch.Tensor, exact: Array, where: Where) -> Iterator[Finding]:
    """Within the budget of fp64, or what is wrong."""
    error = relative_error(rows.numpy(), exact)
    if not error <= FP64_BUDGET:
        yield Finding(law, f"relative error of {what}", f"<= {FP64_BUDGET}", f"{error:.3g}", where)


def _wrong_on_decode(rows: Array, truth: Array, where: Where) -> Finding:
    """The first row that decode has wrong."""
    errors = [relative_error(row, exact) for row, exact in zip(rows, truth, strict=True)]
    wrong = [position for position, error in enumerate(errors) if not error <= FP64_BUDGET]
    return Finding(
        "T5",
        f"{len(wrong)} of {len(truth)} rows on decode, first",
        f"token {wrong[0]} of request {where.request}, as the oracle computes it",
        f"relative error {errors[wrong[0]]:.3g}",
        replace(where, position=wrong[0]),
    )
