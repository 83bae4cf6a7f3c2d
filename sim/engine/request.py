"""A request in the engine, as every rank knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from zlib import crc32

import numpy as np

from sim.engine.truth import Ids, block_ids, fresh_ids, prefix_hashes
from sim.histories.history import Submit


class Phase(Enum):
    """Where a request is in its life."""

    PREFILL = "prefill"  # tokens of its prompt are not computed yet
    READY = "ready"  # all of them are: it may decode, or finish


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens of a prompt that were in cache when it came, by where they were (L4, H3)."""

    device: int
    host: int = 0  # and were put there before it came
    storage: int = 0  # and were fetched for it


@dataclass(slots=True)
class Request:
    """Its tokens, and what of them is in cache. The engine alone changes it."""

    number: int
    ids: Ids  # tokens so far: the prompt, then what was sampled
    hashes: Ids  # of the first 1, 2, … of them
    pages: list[int]  # logical, by page position; covers ``valid``
    valid: int  # tokens whose KV is in cache
    node: int  # of the tree, locked for it
    rotation: int = 0
    found: Found = Found(0)
    is_remembered: bool = True  # when it has left, so that others may be like it

    @property
    def phase(self) -> Phase:
        return Phase.READY if self.valid == len(self.ids) else Phase.PREFILL

    @property
    def remaining(self) -> int:
        """Tokens to compute."""
        return len(self.ids) - self.valid

    def fingerprint(self) -> tuple[int, ...]:
        return self.number, len(self.ids), self.valid, self.node, self.rotation, *self.pages


def name_number(name: str) -> int:
    """A name in a fingerprint: Python's own hash of it is another in every process."""
    return crc32(name.encode())


def prompt(number: int, wanted: Submit, like: Request | None) -> tuple[Ids, Ids]:
    """(ids, hashes) of a prompt: of its blocks, or the first ids of ``like`` and then new ones."""
    if wanted.blocks is not None:
        ids = block_ids(wanted.blocks, wanted.tokens_a_block, wanted.tokens)
    else:
        head = like.ids[: wanted.shared] if like is not None else fresh_ids(number, 0, 0)
        ids = np.concatenate([head, fresh_ids(number, len(head), wanted.tokens)])
    return ids, prefix_hashes(ids)
