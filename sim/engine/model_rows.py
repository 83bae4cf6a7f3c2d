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
from refmodel.model.forward import forward
from refmodel.model.model import build_model
from refmodel.model.shape import TINY
from refmodel.model.weights import arrays, seeded_weights
from refmodel.oracle import Sizes, dense_model, relative_error
from refmodel.precision import FP64_BUDGET
from refmodel.storage.passage import Passage
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
        for layer in range(len(read.layers)):
            read.before_layer(layer)
        ids = torch.cat([self._tokens(turn.ids[turn.extent.prefix : turn.extent.end]) for turn in turns])
        batch = batch_rows(passage, ids, self.model.device)
        hidden = forward(read.group, self.model, batch, read.layers).hidden
        yield hidden
        if passage.rank == 0:  # all ranks have the same, as their digests say
            read.findings.extend(self._compare(hidden, turns))

    def _tokens(self, ids: Ids) -> torch.Tensor:
        return torch.from_numpy((ids % self.shape.vocab).astype("int64"))

    def _compare(self, hidden: torch.Tensor, turns: Sequence[Turn]) -> Iterator[Finding]:
        outputs = hidden.split([turn.extent.tokens for turn in turns])
        for turn, output in zip(turns, outputs, strict=True):
            ids = self._tokens(turn.ids[: turn.extent.end]).numpy()
            sizes = Sizes.of(self.shape)
            exact = dense_model(ids, self._oracle, sizes, layers=self.shape.layers).hidden[-1]
            error = relative_error(output.numpy(), exact[turn.extent.prefix :])
            if not error <= FP64_BUDGET:
                expected, where = f"<= {FP64_BUDGET}", Where(request=turn.name)
                yield Finding("A5", "relative error of the output", expected, f"{error:.3g}", where)
