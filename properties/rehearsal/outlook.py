"""What a step must come to, as the model foresees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from refmodel.layout.geometry import Extent
from sim.histories.history import Gap


@dataclass(frozen=True, slots=True)
class Part:
    """What a request does in a forward."""

    name: str
    extent: Extent
    lanes: tuple[int, ...]  # of the pages that cover the extent, by position
    keeps_head: bool  # the first of them is the request's own open tail

    @property
    def new_lanes(self) -> tuple[int, ...]:
        """Of the pages that it takes."""
        return self.lanes[self.keeps_head :]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a step must come to. What the model cannot say is left open."""

    refused: bool = False
    out_of_pages: bool = False  # that is why
    valid: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # tokens in cache afterwards: one of these
    free: tuple[int, ...] | None = None  # [W] free pages afterwards; None if the victims decide
    evicts: bool = False  # whether the tree may lose pages
    copies: int = 0  # of shared tails
    parts: tuple[Part, ...] = ()  # of a forward
    hit: int = 0  # of a submit: tokens on the device, before anything is loaded
    missing: list[Gap] | None = None  # of a send: what decode must be waiting for

    @property
    def exact(self) -> dict[str, int]:
        """Tokens in cache afterwards, of whom they are certain."""
        return {name: values[0] for name, values in self.valid.items() if len(values) == 1}
