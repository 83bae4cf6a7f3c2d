"""What a history file may say: a pool of pages, and operations on it."""

from __future__ import annotations

from typing import Literal

import msgspec

from refmodel.layout.split import Split
from refmodel.serving.radix import HitMode
from refmodel.storage.reuse import ViewPath
from sim.cases.scenario import AtLeast0, AtLeast1, Kind, Text


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new request: it is matched against the tree, and waits for its first chunk."""

    request: Text
    tokens: AtLeast1  # of its prompt
    like: Text | None = None  # a request whose first tokens it shares
    shared: AtLeast0 = 0  # so many


class Evict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pressure from outside: leaves are evicted until a lane has so many free pages, or none can be."""

    lane: AtLeast0
    free: AtLeast1


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One operation; exactly one of the first keys."""

    submit: Submit | None = None
    forward: list[Text] | None = None  # the next chunk of each of these requests, as far as caps admit them
    decode: list[Text] | None = None  # one sampled token more for each
    finish: Text | None = None  # the request leaves; what it computed stays in the tree
    abort: Text | None = None  # the request leaves; what is its own is freed
    evict: Evict | None = None
    refused: bool = False  # the operation must be refused, and change nothing

    @property
    def name(self) -> str:
        """Which operation it is."""
        return next(name for name in OPERATIONS if getattr(self, name) is not None)


OPERATIONS = ("submit", "forward", "decode", "finish", "abort", "evict")


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A serving history on W ranks, and what must hold after every step of it."""

    title: Text
    why: Text
    laws: list[str]
    world_size: AtLeast1
    page_size: AtLeast1
    pages_per_lane: AtLeast1
    history: list[Step]
    hit: Literal["token", "page"] = "token"
    split: Split = Split.PAGE_ALIGNED
    view: ViewPath = ViewPath.FULL
    prefetch: bool = False
    layers: AtLeast1 = 1
    chunk: AtLeast1 | None = None  # most new tokens of a request in a forward
    max_requests: AtLeast1 | None = None
    max_tokens: AtLeast1 | None = None  # sum of page-aligned extends of a forward
    rotate: bool = False  # requests begin in turn on another rank, so that lanes fill evenly
    incident: str | None = None
    source: str | None = None
    worlds: tuple[Kind, ...] = ("lockstep",)
    file: str = msgspec.field(default="", name="<file>")

    @property
    def hit_mode(self) -> HitMode:
        return HitMode(self.hit)
