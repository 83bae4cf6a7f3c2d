"""A diagnosis, and the words it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refmodel.collectives import Call

# What one call of a rank leaves open, and its next one decides.
SKIP_OR_SWAP = "skip or swap"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one rank did, or did not do."""

    fault: str  # "skip", "twice", "swap", "kind", "shape", "dtype", "return", "hang", …
    rank: int
    site: str  # of the call that it is about
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def name_of(number: Call, named: Call | None = None) -> str:
    """ "#3 kv.view"; of swapped calls the number is that of the other."""
    return f"#{number.sequence} {(named or number).site}"


def ranks_text(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
