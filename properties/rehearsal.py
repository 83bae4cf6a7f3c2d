"""A history without ranks and bytes: what each step must come to, by a simple model (laws L1–L7, G2–G4).

The engine runs beside a model that knows one thing of the cache: the tokens that each page of the tree stands
for. Hits, refusals, free pages and the ends of chunks follow from it by counting; none is asked of the rooms
that are judged. What the model says is written into the step, so that the ranks are held to it as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from refmodel.errors import Finding, Where
from refmodel.layout.geometry import Extent, coverage, num_pages
from refmodel.layout.ownership import owner
from refmodel.layout.placement import page_lanes
from refmodel.layout.plan import Plan, plan_batch
from refmodel.serving.radix import HitMode
from sim.engine import engine as engines
from sim.engine.engine import Engine
from sim.engine.play import apply
from sim.engine.request import Phase, Request
from sim.engine.truth import Ids, sampled_id
from sim.engine.turn import Copy, Turn
from sim.histories.history import After, History, Step, Submit

MARKS = (
    "eviction", "out of pages", "refused", "hit", "hit mid-page", "whole prompt cached", "copy on write",
    "decode", "batch", "cut by caps", "chunked", "victims of one age",
)  # fmt: skip

# What a step that is refused, or not refused, against the model breaks.
_LAW_OF_REFUSAL = {
    "submit": "L4",
    "forward": "L3",
    "decode": "L3",
    "finish": "L6",
    "abort": "L1",
    "evict": "L3",
}


class NoBytes:
    """Stands where storage would, and remembers what the engine asked of it in a step."""

    def __init__(self, *_: object) -> None:
        self.findings: list[Finding] = []
        self.forget()

    def forget(self) -> None:
        self.copies: list[Copy] = []
        self.tables: list[list[int]] = []

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        self.copies = list(copies)

    def exchange(self, turns: Sequence[Turn], plan: Plan, tables: Sequence[Sequence[int]]) -> None:
        self.tables = [list(table) for table in tables]


@dataclass(frozen=True, slots=True)
class Seen:
    """A node of the tree, as its fingerprint shows it."""

    number: int
    above: int
    access: int
    locks: int
    pages: tuple[int, ...]


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
    """What a step must come to."""

    refused: bool = False
    out_of_pages: bool = False  # that is why
    valid: tuple[tuple[str, int], ...] = ()  # tokens in cache of those it is about, afterwards
    free: tuple[int, ...] | None = None  # [W] free pages afterwards; None if the victims decide
    evicts: bool = False  # whether the tree may lose pages
    copies: int = 0  # of shared tails
    parts: tuple[Part, ...] = ()  # of a forward


class Rehearsal:
    """The steps so far, an engine that made them, and the model. :meth:`step` changes all three."""

    def __init__(self, history: History) -> None:
        self.setting = history
        self.steps: list[Step] = []
        self.findings: list[Finding] = []
        self.marks: set[str] = set()
        self.evictions = 0  # pages that left the tree
        self.crowded = False  # the last step found no pages
        self.of_one_age = 0  # most leaves of one access time that an eviction had to choose from
        self.contents: dict[int, Ids] = {}  # page of the tree → the tokens from 0 to its end
        with patch.object(engines, "Storage", NoBytes):
            group: Any = None  # nothing asks it
            self.engine = Engine(history, 0, group)
        self.bytes: Any = self.engine.storage

    @property
    def history(self) -> History:
        """The history so far, with what the model says of each step."""
        return msgspec.structs.replace(self.setting, history=self.steps)

    @property
    def running(self) -> dict[str, Request]:
        return self.engine.tables.requests

    def names(self, phase: Phase | None = None) -> list[str]:
        """Requests that have not left, in order of submission."""
        return [name for name, request in self.running.items() if phase in (None, request.phase)]

    def new_name(self, ahead: int = 0) -> str:
        """Of the next request, or of one after it: a, b, … z, then r26, …"""
        number = len(self.engine.tables.seen) + ahead
        return chr(ord("a") + number) if number < 26 else f"r{number}"

    def free_pages(self) -> tuple[int, ...]:
        """[W] of each lane."""
        return tuple(map(self.engine.tables.lanes.free_pages, range(self.setting.world_size)))

    # -- a step ------------------------------------------------------------------------------------------

    def step(self, wanted: Step) -> None:
        """Do one operation. What it says of itself is replaced by what the model says."""
        outlook = self._outlook(wanted)
        self.crowded = outlook.out_of_pages
        expect = After(valid=dict(outlook.valid), free=list(outlook.free) if outlook.free else None)
        step = msgspec.structs.replace(wanted, refused=outlook.refused, expect=expect)
        self.steps.append(step)
        self.engine.tables.now = len(self.steps)
        if outlook.evicts:
            self.of_one_age = max(self.of_one_age, self._leaves_of_one_age())
        cached, leaving = set(self.engine.tables.tree.pages()), self._leaving(step)
        self.bytes.forget()
        try:
            done = apply(self.engine, step)
            refusal, found = done.refusal, [*done.findings, *self.engine.tables.check()]
            found += self._compare(step, outlook, refusal, cached)
        except Exception as crash:  # a wrong engine may do anything
            found, refusal = [Finding("crash", "engine", "a result", repr(crash))], "crash"
        number = len(self.steps)
        self.findings += [replace(each, where=replace(each.where, step=number)) for each in found]
        self._mark(step, outlook, refusal)
        self._learn(leaving)

    def _outlook(self, step: Step) -> Outlook:
        """From the state before the step."""
        operation = getattr(step, step.name)
        outlook: Outlook | None = getattr(self, f"_of_{step.name}")(operation)
        if outlook is None:
            return Outlook(refused=True, free=self.free_pages())
        return outlook

    def _of_submit(self, wanted: Submit) -> Outlook | None:
        seen = self.engine.tables.seen
        if wanted.request in seen or (wanted.like is not None and wanted.like not in seen):
            return None
        shared = min(len(seen[wanted.like].ids), wanted.tokens) if wanted.like else 0
        pages = num_pages(wanted.tokens, self.setting.page_size)
        if wanted.shared > shared or pages > self.setting.world_size * self.setting.pages_per_lane:
            return None
        hit = self._hit(seen[wanted.like].ids[: wanted.shared], wanted.tokens) if wanted.like else 0
        return Outlook(valid=((wanted.request, hit),), free=self.free_pages())

    def _hit(self, known: Ids, tokens: int) -> int:
        """Tokens of a prompt in cache, of which only the first ``known`` are not new to all (L4)."""
        longest = max((_common(content, known) for content in self.contents.values()), default=0)
        hit = min(longest, tokens - 1)
        return hit - hit % self.setting.page_size if self.setting.hit_mode is HitMode.PAGE else hit

    def _of_finish(self, name: str) -> Outlook | None:
        request = self.running.get(name)
        if request is None or request.phase is not Phase.READY:
            return None
        whole = request.valid // self.setting.page_size
        stays = self.setting.hit_mode is HitMode.TOKEN and not self._has(request.ids[: request.valid])
        return self._freed([] if stays else request.pages[whole:])

    def _of_abort(self, name: str) -> Outlook | None:
        request = self.running.get(name)
        if request is None:
            return None
        return self._freed([page for page in request.pages if page not in self.contents])

    def _freed(self, pages: Sequence[int]) -> Outlook:
        freed = Counter(owner(page, self.setting.world_size) for page in pages)
        return Outlook(free=tuple(free + freed[lane] for lane, free in enumerate(self.free_pages())))

    def _of_evict(self, wanted: Any) -> Outlook | None:
        if wanted.lane >= self.setting.world_size or wanted.free > self.setting.pages_per_lane:
            return None
        return self._with_pages(Counter({wanted.lane: wanted.free}), taken=False)

    def _of_forward(self, names: Sequence[str]) -> Outlook | None:
        if not self._all_in(names, Phase.PREFILL):
            return None
        extents = [self._next_chunk(self.running[name]) for name in names]
        budget, P = self.setting.max_tokens, self.setting.page_size
        most = self.setting.max_requests or len(names)
        while len(extents) > 1 and (
            len(extents) > most or (budget and sum(coverage(e.tokens, P) for e in extents) > budget)
        ):
            extents.pop()
        return self._of_turns(names, extents)

    def _next_chunk(self, request: Request) -> Extent:
        """All that remains, or to the last page multiple within a chunk (G4)."""
        stop, P = len(request.ids), self.setting.page_size
        if self.setting.chunk is not None and stop - request.valid > self.setting.chunk:
            stop = max(end for end in range(request.valid + self.setting.chunk + 1) if end % P == 0)
        return Extent(request.valid, stop - request.valid)

    def _of_decode(self, names: Sequence[str]) -> Outlook | None:
        if not self._all_in(names, Phase.READY):
            return None
        return self._of_turns(names, [Extent(self.running[name].valid, 1) for name in names])

    def _all_in(self, names: Sequence[str], phase: Phase) -> bool:
        waiting = self.names(phase)
        return bool(names) and len(set(names)) == len(names) and all(name in waiting for name in names)

    def _of_turns(self, names: Sequence[str], extents: Sequence[Extent]) -> Outlook:
        parts = self._parts(names, extents)
        wanted = Counter(lane for part in parts for lane in part.new_lanes)
        outlook = self._with_pages(wanted, taken=True)
        if outlook.refused:
            return outlook
        ends = {name: self.running[name].valid for name in names} | {p.name: p.extent.end for p in parts}
        P = self.setting.page_size
        copies = sum(bool(part.extent.prefix % P) and not part.keeps_head for part in parts)
        free = outlook.free and self._with_duplicates(outlook.free, parts)
        return replace(outlook, valid=tuple(ends.items()), free=free, copies=copies, parts=parts)

    def _parts(self, names: Sequence[str], extents: Sequence[Extent]) -> tuple[Part, ...]:
        requests = [self.running[name] for name in names[: len(extents)]]
        rotations = [request.rotation for request in requests]
        plan = plan_batch(extents, self.engine.tables.grid, self.setting.split, rotations=rotations)
        return tuple(
            Part(
                name,
                extent,
                tuple(page_lanes(plan, i).tolist()),
                bool(extent.prefix % self.setting.page_size) and request.pages[-1] not in self.contents,
            )
            for i, (name, request, extent) in enumerate(zip(names, requests, extents, strict=False))
        )

    def _with_pages(self, wanted: Counter[int], *, taken: bool) -> Outlook:
        """Whether the lanes can give these pages, those counted in that no lock keeps (L3)."""
        free = self.free_pages()
        short = [lane for lane, count in wanted.items() if count > free[lane]]
        if not short:
            return Outlook(free=tuple(n - taken * wanted[lane] for lane, n in enumerate(free)))
        cached = self._by_lane(self.contents)
        if any(wanted[lane] > free[lane] + cached[lane] for lane in short):
            return Outlook(refused=True, out_of_pages=True, free=free)  # nothing is evicted in vain
        loose = self._by_lane(self._loose())
        refused = any(wanted[lane] > free[lane] + loose[lane] for lane in short)
        return Outlook(refused, refused, evicts=True)

    def _with_duplicates(self, free: tuple[int, ...], parts: Sequence[Part]) -> tuple[int, ...]:
        """Plus the pages that are freed at once, as the tree has others for the same tokens (L6)."""
        P, left = self.setting.page_size, list(free)
        inserted: list[Ids] = []
        for part in parts:
            request, first = self.running[part.name], part.extent.prefix // P
            ids = request.ids
            if part.extent.end > len(ids):
                ids = sampled_id(ids, request.hashes)
            for position in range(first, part.extent.end // P):
                content = ids[: (position + 1) * P]
                if self._has(content) or any(_common(other, content) == len(content) for other in inserted):
                    kept = part.keeps_head and position == first
                    page = request.pages[position] if kept else part.lanes[position - first]
                    left[page % len(left)] += 1  # a lane is the owner of all its pages
            inserted.append(ids[: part.extent.end - part.extent.end % P])
        return tuple(left)

    def _has(self, tokens: Ids) -> bool:
        """Whether a page of the tree stands for these tokens, at least."""
        return any(_common(content, tokens) == len(tokens) for content in self.contents.values())

    def _by_lane(self, pages: Sequence[int] | dict[int, Ids]) -> Counter[int]:
        return Counter(owner(page, self.setting.world_size) for page in pages)

    # -- the tree, by its fingerprint ---------------------------------------------------------------------

    def _nodes(self) -> dict[int, Seen]:
        rows = iter(self.engine.tables.tree.fingerprint()[1:])
        nodes = {}
        for number, above, access, locks, _ in rows:
            nodes[number] = Seen(number, above, access, locks, next(rows))
        return nodes

    def _loose(self) -> list[int]:
        """Pages at no locked node and above none (L6)."""
        nodes = self._nodes()
        kept = {each.number for node in nodes.values() if node.locks for each in _path(nodes, node.number)}
        return [page for number, node in nodes.items() if number not in kept for page in node.pages]

    def _leaves_of_one_age(self) -> int:
        """Most leaves without locks that were touched at the same time, as only a batch does."""
        nodes = self._nodes()
        inner = {node.above for node in nodes.values()}
        ages = Counter(n.access for n in nodes.values() if n.number not in inner and not n.locks)
        return max(ages.values(), default=0)

    # -- afterwards ---------------------------------------------------------------------------------------

    def _compare(
        self, step: Step, outlook: Outlook, refusal: str | None, cached: set[int]
    ) -> Iterator[Finding]:
        if (refusal is not None) != outlook.refused:
            expected = "refused" if outlook.refused else "done"
            yield Finding(_LAW_OF_REFUSAL[step.name], step.name, expected, refusal or "done")
            return
        if not outlook.evicts and not cached <= set(self.engine.tables.tree.pages()):
            yield Finding("L3", "pages evicted", "none: nothing needs them", "some")
        yield from self._compare_locks()
        if refusal is None:
            yield from self._compare_numbers(outlook)
            yield from self._compare_parts(outlook)
            submitted = [step.submit.request] if step.submit else []
            yield from self._compare_access([*submitted, *(part.name for part in outlook.parts)])

    def _compare_numbers(self, outlook: Outlook) -> Iterator[Finding]:
        for name, valid in outlook.valid:
            found = self.running[name].valid
            if found != valid:
                yield Finding("G4" if outlook.parts else "L4", "tokens in cache", str(valid), str(found))
        free = self.free_pages()
        if outlook.free not in (None, free):
            yield Finding("L2", "free pages", str(outlook.free), str(free))

    def _compare_access(self, names: Sequence[str]) -> Iterator[Finding]:
        """What a step used is used now: it is evicted last (L7)."""
        nodes = self._nodes()
        for name in names:
            times = {node.access for node in _path(nodes, self.running[name].node) if node.number}
            if times - {len(self.steps)}:
                yield Finding("L7", "access time of what was used", str(len(self.steps)), str(min(times)))

    def _compare_parts(self, outlook: Outlook) -> Iterator[Finding]:
        """Where pages were taken, what was copied before, and who has the tails afterwards."""
        if len(self.bytes.copies) != outlook.copies:
            yield Finding("L5", "copies of shared tails", str(outlook.copies), str(len(self.bytes.copies)))
        if len(self.bytes.tables) != len(outlook.parts):
            yield Finding("G2", "requests of a batch", str(len(outlook.parts)), str(len(self.bytes.tables)))
            return
        W, P = self.setting.world_size, self.setting.page_size
        for part, table in zip(outlook.parts, self.bytes.tables, strict=True):
            taken = tuple(owner(page, W) for page in table[len(table) - len(part.new_lanes) :])
            if taken != part.new_lanes:
                law = "L5" if taken[1:] == part.new_lanes[1:] else "L3"
                yield Finding(law, "lanes of the pages taken", str(part.new_lanes), str(taken))
            tail = self.running[part.name].pages[part.extent.end // P :]
            if any(map(self.engine.tables.tree.holds, tail)):
                yield Finding("L6", "tail after a chunk", "the request's own", "one of the tree")

    def _compare_locks(self) -> Iterator[Finding]:
        """Each request locks its node once, and every page of the tree that it uses is on the way there."""
        nodes = self._nodes()
        locks = Counter(request.node for request in self.running.values())
        for number, node in nodes.items():
            if node.locks != locks[number]:
                yield Finding("L6", "locks of a node", str(locks[number]), str(node.locks))
        for name, request in self.running.items():
            safe = {page for node in _path(nodes, request.node) for page in node.pages}
            if not safe >= {page for page in request.pages if self.engine.tables.tree.holds(page)}:
                yield Finding("L6", "pages that a request uses", "locked", "not all", Where(request=name))

    def _leaving(self, step: Step) -> tuple[Request, ...]:
        request = self.running.get(step.finish or "")
        return (request,) if request else ()

    def _learn(self, leaving: Sequence[Request]) -> None:
        """What each page of the tree stands for."""
        holds, P = self.engine.tables.tree.holds, self.setting.page_size
        gone = set(self.contents)
        for request in (*self.running.values(), *leaving):
            for position, page in enumerate(request.pages):
                end = (position + 1) * P
                if holds(page) and (end <= request.valid or request in leaving):
                    self.contents[page] = request.ids[: min(end, request.valid)]
        self.contents = {page: content for page, content in self.contents.items() if holds(page)}
        self.evictions += len(gone - set(self.contents))

    def _mark(self, step: Step, outlook: Outlook, refusal: str | None) -> None:
        P, done = self.setting.page_size, refusal is None
        hit = outlook.valid[0][1] if step.submit and done else 0
        reached = (
            not self.contents.keys() <= set(self.engine.tables.tree.pages()),
            outlook.out_of_pages,
            not done,
            hit > 0,
            hit % P > 0,
            step.submit is not None and 0 < hit == step.submit.tokens - 1,
            bool(self.bytes.copies),
            done and step.decode is not None,
            len(self.bytes.tables) > 1,
            0 < len(self.bytes.tables) < len(step.forward or ()),
            any(part.extent.end < len(self.running[part.name].ids) for part in outlook.parts if done),
            self.of_one_age > 1,
        )
        self.marks |= {mark for mark, there in zip(MARKS, reached, strict=True) if there}


def _common(one: Ids, other: Ids) -> int:
    """First tokens that two lists share."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


def _path(nodes: dict[int, Seen], number: int) -> list[Seen]:
    """From a node to the root, which has number 0."""
    path = [nodes[number]]
    while path[-1].number:
        path.append(nodes[path[-1].above])
    return path
