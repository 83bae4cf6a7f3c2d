"""An engine that moves no bytes, and what is heard of it in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any
from unittest.mock import patch

from refmodel.errors import Finding
from refmodel.layout.plan import Plan
from refmodel.serving.host_moves import Fill, Landing
from sim.engine import engine as engines
from sim.engine.engine import Engine
from sim.engine.loading import cache_layers
from sim.engine.turn import Copy, Turn
from sim.histories.history import History


class Heard:
    """What an engine asked of its bytes in one step, and which pages left its tree."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Before a step."""
        self.copies: list[Copy] = []
        self.tables: list[list[int]] = []  # of each request of a forward, by page position
        self.evicted: list[int] = []  # pages, in order
        self.filled: list[tuple[int, int]] = []  # (key, lane) of what was backed up


class NoShards:
    """Stands where the shards would."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.findings: list[Finding] = []
        self.before_layer: object = None

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        self.heard.copies = list(copies)

    def exchange(self, turns: Sequence[Turn], plan: Plan, tables: Sequence[Sequence[int]]) -> None:
        self.heard.tables = [list(table) for table in tables]


class NoDecode:
    """Stands where decode's cache would."""

    def land(self, *_: object) -> None: ...

    def decode(self, *_: object) -> None: ...

    def compare(self, *_: object) -> None: ...


class Files:
    """Stands where host pages and files would, and knows which files are sound."""

    def __init__(self, heard: Heard, caches: Iterable[str]) -> None:
        self.heard = heard
        self.caches = frozenset(caches)
        self.sound: dict[int, set[str]] = {}  # key of what was ever stored → caches whose file is sound

    def back_up(self, fill: Fill, pages: Sequence[int]) -> None:
        self.heard.filled += [(move.key, move.lane) for move in fill.moves]
        self.sound |= {move.key: set(self.caches) for move in fill.moves}

    def bring(self, landing: Landing, cache: str, layer: int) -> None: ...

    def available(self, keys: Sequence[int], lanes: Sequence[int]) -> int:
        """Leading pages of which every file is sound (H3)."""
        return sum(1 for _ in takewhile(self.is_sound, keys))

    def is_sound(self, key: int) -> bool:
        """Whether every file of a page is there and whole."""
        return self.caches <= self.sound.get(key, set())

    def fetch(self, fill: Fill, keys: Sequence[int], arrived: Mapping[str, int]) -> None: ...

    def spoil(self, key: int, cache: str, how: str) -> None:
        self.sound[key].discard(cache)

    def close(self) -> None: ...


class DryEngine(Engine):
    """An engine of one rank that knows all tables and has no bytes."""

    def __init__(self, history: History) -> None:
        self.heard = Heard()
        self.files = Files(self.heard, cache_layers(history))
        stand_ins: dict[str, Any] = {
            "Storage": lambda *_: NoShards(self.heard),
            "Landing": lambda *_: NoDecode(),
            "Hosting": lambda *_: self.files,
        }
        group: Any = None  # nothing asks it
        with patch.multiple(engines, **stand_ins):
            super().__init__(history, 0, group)
        self._listen()

    def _listen(self) -> None:
        tree = self.tables.tree
        evict = tree.evict

        def listened(lane: int, world_size: int) -> tuple[int, ...]:
            pages = evict(lane, world_size)
            self.heard.evicted += pages
            return pages

        setattr(tree, "evict", listened)  # noqa: B010 — a method of one tree, in front of its class's
