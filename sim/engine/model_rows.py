"""Rows that a tiny model computes, in fp64: every output is compared with the oracle (law A5).

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
from refmodel.model.forward import forward
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
        """One forward of the model; the outputs of its new tokens."""
        ids = torch.cat([self._tokens(turn.ids[turn.extent.prefix : turn.extent.end]) for turn in turns])
        batch = batch_rows(passage, ids, self.model.device)
        hidden = forward(read.group, self.model, batch, read.layers, ready=read.before_layer).hidden
        yield hidden
        if passage.rank == 0:  # all ranks have the same, as their digests say
            read.findings.extend(self._compare(hidden, turns))

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
            for cache, truth in ((Cache.KV, exact.kv[layer]), (Cache.INDEX, exact.index_keys[layer])):
                rows = self.formats[cache].unpack(held.packed(layer, cache)).numpy()
                if not relative_error(rows, truth) <= FP64_BUDGET:
                    yield _wrong_on_decode(rows, truth, held.where(layer, cache))

    def _tokens(self, ids: Ids) -> torch.Tensor:
        return torch.from_numpy((ids % self.shape.vocab).astype("int64"))

    def _exact(self, ids: torch.Tensor) -> Dense:
        return dense_model(ids.numpy(), self._oracle, Sizes.of(self.shape), layers=self.shape.layers)

    def _compare(self, hidden: torch.Tensor, turns: Sequence[Turn]) -> Iterator[Finding]:
        outputs = hidden.split([turn.extent.tokens for turn in turns])
        for turn, output in zip(turns, outputs, strict=True):
            exact = self._exact(self._tokens(turn.ids[: turn.extent.end])).hidden[-1]
            error = relative_error(output.numpy(), exact[turn.extent.prefix :])
            if not error <= FP64_BUDGET:
                expected, where = f"<= {FP64_BUDGET}", Where(request=turn.name)
                yield Finding("A5", "relative error of the output", expected, f"{error:.3g}", where)


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
