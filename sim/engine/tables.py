"""What every rank knows of all pages and requests: the same on all of them, after every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import Plan
from refmodel.serving.lanes import Lanes, make_room
from refmodel.serving.radix import RadixTree
from refmodel.serving.request_pages import copy_lane, copy_on_write, end_of_chunk
from sim.engine.decode_server import Decoding
from sim.engine.host_tables import HostTables
from sim.engine.request import Found, Phase, Request, prompt
from sim.engine.sending import Transfers
from sim.engine.truth import prefix_hashes
from sim.engine.turn import Copy, Turn
from sim.histories.history import History, Submit


class Tables:
    """Lanes, tree and requests. Every change is a function of shared metadata, whole or not at all.

    Eviction is the one thing that stays when what it was for is refused after all (L3).
    """

    def __init__(self, history: History) -> None:
        self.grid = Grid(history.world_size, history.page_size)
        self.rotate = history.rotate
        self.lanes = Lanes(self.grid, history.pages_per_lane)
        self.tree = RadixTree(history.page_size, history.hit_mode, bigram=history.bigram)
        self.requests: dict[str, Request] = {}
        # Also those that have left, which others may be like; of those made of blocks only the name is kept.
        self.seen: dict[str, Request] = {}
        self.names: set[str] = set()  # of all requests ever
        self.evicted_pages = 0  # that left the tree so far
        self.transfers = Transfers(history)
        self.host = host_tables(history, self)
        self.now = 0  # steps so far: the logical time

    # -- requests ----------------------------------------------------------------------------------------

    def admit(self, wanted: Submit) -> None:
        """A new request: what it hits is locked, so that nobody evicts it (L4, L6)."""
        like = self._like(wanted)
        self._check_size(wanted)
        if wanted.prefetch and (self.host is None or not self.host.history.storage):
            raise InvalidInput("storage", expected="on", received="off", where=Where(request=wanted.request))
        number = len(self.names)
        ids, hashes = prompt(number, wanted, like)
        hit = self.tree.match(ids, self.now)
        self.tree.lock(hit.node)
        found = Found(hit.valid)
        if self.host is not None:
            hit, found = self.host.load_back(wanted, ids, hashes, hit, self.now)
        rotation = number % self.grid.world_size if self.rotate else 0
        remembered = wanted.blocks is None
        request = Request(
            number, ids, hashes, list(hit.pages), hit.valid, hit.node, rotation, found, remembered
        )
        self.requests[wanted.request] = self.seen[wanted.request] = request
        self.names.add(wanted.request)
        if self.host is not None:
            self.host.used(request, 0, self.now)

    def _like(self, wanted: Submit) -> Request | None:
        where = Where(request=wanted.request)
        if wanted.request in self.names:
            raise InvalidInput("request", expected="a new name", received="one seen before", where=where)
        if wanted.like is not None and wanted.like not in self.seen:
            raise unknown(wanted.like)
        like = self.seen[wanted.like] if wanted.like else None
        most = min(len(like.ids), wanted.tokens) if like else 0
        if wanted.shared > most:
            raise InvalidInput("shared tokens", expected=f"0 … {most}", received=wanted.shared, where=where)
        return like

    def _check_size(self, wanted: Submit) -> None:
        capacity = self.grid.world_size * self.lanes.pages_per_lane
        needed = num_pages(wanted.tokens, self.grid.page_size)
        if needed > capacity:
            raise InvalidInput(
                "request",
                expected=f"at most {capacity} pages, which are all",
                received=needed,
                where=Where(request=wanted.request),
                fix="It would never be admitted.",
            )

    def known(self, name: str) -> Request:
        """A request that has not left."""
        if name not in self.requests:
            raise unknown(name)
        return self.requests[name]

    def once_known(self, name: str) -> Request:
        """A request that may have left, unless it was made of blocks."""
        if name not in self.seen:
            raise unknown(name)
        return self.seen[name]

    def in_phase(self, names: Sequence[str], phase: Phase) -> list[Request]:
        """The requests of these names, if each is there once and in that phase."""
        if not names or len(set(names)) != len(names):
            raise InvalidInput("requests", expected="at least one, each once", received=list(names))
        requests = [self.known(name) for name in names]
        for name, request in zip(names, requests, strict=True):
            if request.phase is not phase:
                raise InvalidInput(
                    "request",
                    expected=f"one in phase {phase.value}",
                    received=request.phase.value,
                    where=Where(request=name),
                )
            if phase is Phase.READY:
                self.transfers.require_settled(name)
        return requests

    def finish(self, name: str) -> None:
        """A request leaves; its pages, in mode TOKEN its tail too, stay in the tree (L4, L6)."""
        (request,) = self.in_phase([name], Phase.READY)
        inserted = self.tree.insert(request.ids[: request.valid], request.pages, self.now, finished=True)
        self.lanes.cache(inserted.adopted)
        self.lanes.free(inserted.duplicates + inserted.rest)
        self._leave(name)

    def abort(self, name: str) -> None:
        """A request leaves; what is its own is freed."""
        request = self.known(name)
        self.transfers.require_settled(name)
        self.lanes.free(page for page in request.pages if not self.tree.holds(page))
        self._leave(name)

    def _leave(self, name: str) -> None:
        if self.host is not None:
            self.host.loads.leave(name)
        request = self.requests.pop(name)
        self.tree.unlock(request.node)
        self.transfers.leave(name)
        if not request.is_remembered:
            del self.seen[name]

    def extend_there(self, name: str) -> Decoding:
        """One sampled token more on decode. Prefill keeps what it sent; others may be like all of it."""
        decoding = self.transfers.decode.extend(name)
        hashes = prefix_hashes(decoding.ids)
        self.seen[name] = replace(self.seen[name], ids=decoding.ids, hashes=hashes)
        return decoding

    def valid(self, name: str) -> int:
        """Tokens of a request in cache: in decode's, once it goes on there."""
        decode = self.transfers.decode
        return len(decode.of(name).ids) if decode.has(name) else self.known(name).valid

    # -- pages -------------------------------------------------------------------------------------------

    def make_room(self, wanted: Sequence[int]) -> None:
        """Evict until each lane has the pages wanted of it (L3, L7)."""
        make_room(self.lanes, wanted, self._evict)

    def _evict(self, lane: int) -> tuple[int, ...]:
        evicted = self.tree.evict(lane, self.grid.world_size)
        self.evicted_pages += len(evicted)
        if self.host is not None:
            self.host.left(evicted, self.now)
        return evicted

    def take(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """A page of each lane, for which others are evicted if need be (L1, L3)."""
        self.make_room(wanted)
        return self.lanes.take(wanted)

    def allocate(self, turns: Sequence[Turn], plan: Plan) -> tuple[list[list[int]], list[Copy]]:
        """Page lists [requests] that cover the extents, with copies of shared tails (L2, L5, O4)."""
        tails = [
            copy_on_write(turn.request.pages, turn.extent.prefix, self.tree.holds, self.grid.page_size)
            for turn in turns
        ]
        shared = [i for i, position in enumerate(tails) if position is not None]
        new = [new_page_lanes(plan, i).tolist() for i in range(len(turns))]
        wanted = [*(copy_lane(plan, i) for i in shared), *(lane for lanes in new for lane in lanes)]
        taken = iter(self.take(wanted))
        tables, copies = [list(turn.request.pages) for turn in turns], []
        for i in shared:
            position, page = tails[i], next(taken)
            assert position is not None
            copies.append(Copy(tables[i][position], page))
            tables[i][position] = page
        for table, lanes in zip(tables, new, strict=True):
            table.extend(next(taken) for _ in lanes)
        return tables, copies

    def end_chunk(self, turn: Turn, pages: Sequence[int]) -> None:
        """Whole pages go to the tree, and the request is bound to the tree's (L6)."""
        request = turn.request
        request.ids, request.hashes, request.valid = turn.ids, turn.hashes, turn.extent.end
        ended = end_of_chunk(self.tree, request.ids[: request.valid], pages, self.now)
        self.lanes.cache(ended.adopted)
        self.lanes.free(ended.duplicates)
        self.tree.lock(ended.node)
        self.tree.unlock(request.node)
        request.pages, request.node = list(ended.pages), ended.node
        if self.host is not None:
            self.host.used(request, turn.extent.prefix // self.grid.page_size, self.now)

    # -- state -------------------------------------------------------------------------------------------

    def fingerprint(self) -> int:
        """Of everything: equal on every rank after every step (L7)."""
        requests = tuple(request.fingerprint() for request in self.requests.values())
        shared = self.lanes.fingerprint(), self.tree.fingerprint(), self.transfers.fingerprint()
        host = self.host.fingerprint() if self.host is not None else ()
        return hash((*shared, requests, host))

    def check(self) -> list[Finding]:
        """Laws of lanes and tree, and that each page belongs to who has it (L1, L6)."""
        state = self.lanes.fingerprint()
        held = sorted(page for _, pages, _ in state for page in pages)
        cached = sorted(page for _, _, pages in state for page in pages)
        in_tree = sorted(self.tree.pages())
        own = sorted(
            page for request in self.requests.values() for page in request.pages if not self.tree.holds(page)
        )
        found = [*self.lanes.check(), *self.tree.check(), *self.transfers.check(self.requests)]
        if self.host is not None:
            found += self.host.check()
        if self.tree.locks() != len(self.requests):
            expected = f"{len(self.requests)}, one a request"
            found.append(Finding("L6", "locks of the tree", expected, str(self.tree.locks())))
        if own != held:
            found.append(Finding("L1", "pages that requests hold", str(own), str(held)))
        if in_tree != cached:
            found.append(Finding("L1", "pages that the tree holds", str(in_tree), str(cached)))
        return found


def host_tables(history: History, tables: Tables) -> HostTables | None:
    """The host cache beside these tables, if the history has one."""
    if history.host_pages_per_lane:
        return HostTables(history, tables.lanes, tables.tree, tables.take)
    if history.storage:
        raise InvalidInput("storage", expected="off without a host cache", received="on")
    return None


def unknown(name: str) -> InvalidInput:
    """A request that nobody submitted, or that has left."""
    expected = "one that was submitted and has not left"
    return InvalidInput("request", expected=expected, received=name, where=Where(request=name))
