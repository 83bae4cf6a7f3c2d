"""The serving engine of one rank: every rank makes the same decisions on its own copy of the tables.

submit → match → allocate → plan → write → view → insert, chunk by chunk; then decode, finish or abort.
Decisions are functions of shared metadata, bytes are each rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Extent
from refmodel.layout.plan import plan_batch
from refmodel.serving.admission import Caps, admit, chunk_end
from sim.engine.host_tables import HostTables
from sim.engine.hosting import Hosting
from sim.engine.landing import Landing
from sim.engine.request import Phase, Request
from sim.engine.sending import Parcel
from sim.engine.storage import Storage
from sim.engine.tables import Tables
from sim.engine.truth import prefix_hashes, sampled_id
from sim.engine.turn import Turn
from sim.histories.history import (
    Backup,
    DropHost,
    Evict,
    History,
    Prefetch,
    Resend,
    Send,
    Spoil,
    Submit,
)


class Engine:
    """One rank: the tables, which are those of all ranks, and its storage. A method an operation.

    An operation that is refused raises, and leaves the tables as they were.
    """

    def __init__(self, history: History, rank: int, group: dist.ProcessGroup) -> None:
        self.history = history
        self.caps = Caps(history.max_requests, history.max_tokens)
        self.tables = Tables(history)
        self.storage = Storage(history, rank, group)
        self.landing = Landing(history, self.storage)
        self.hosting: Hosting | None = None
        if self.tables.host is not None:
            self.tables.host.bytes = self.hosting = Hosting(history, self.storage)
            self.storage.before_layer = self.tables.host.loads.wait_for_layer

    def submit(self, wanted: Submit) -> None:
        """A new request: it is matched against the tree, and waits for its first chunk."""
        self.tables.admit(wanted)

    def forward(self, names: Sequence[str]) -> None:
        """The next chunk of the first of these requests, as many as caps admit (G1–G4)."""
        requests = self.tables.in_phase(names, Phase.PREFILL)
        turns = [self._chunk(name, request) for name, request in zip(names, requests, strict=True)]
        tokens = [turn.extent.tokens for turn in turns]
        P = self.history.page_size
        self._run(turns[: admit(tokens, self.caps, P, batch_flag=self.history.batch, shared_kv=True)])

    def _chunk(self, name: str, request: Request) -> Turn:
        end = len(request.ids)
        if self.history.chunk is not None:
            end = chunk_end(request.valid, request.remaining, self.history.chunk, self.history.page_size)
        extent = Extent(request.valid, end - request.valid)
        return Turn(name, request, request.ids, request.hashes, extent)

    def decode(self, names: Sequence[str]) -> None:
        """One sampled token more for each of these requests."""
        turns = []
        for name, request in zip(names, self.tables.in_phase(names, Phase.READY), strict=True):
            ids = sampled_id(request.ids, request.hashes)
            turns.append(Turn(name, request, ids, prefix_hashes(ids), Extent(request.valid, 1)))
        self._run(turns)

    def _run(self, turns: Sequence[Turn]) -> None:
        """One forward: allocate, copy shared tails, write and read; then whole pages go to the tree."""
        rotations = [turn.request.rotation for turn in turns]
        extents = [turn.extent for turn in turns]
        plan = plan_batch(extents, self.tables.grid, self.history.split, rotations=rotations)
        tables, copies = self.tables.allocate(turns, plan)
        if self.tables.host is not None:
            read = {page for pages in tables for page in pages}
            self.tables.host.loads.begin(read, {copy.old for copy in copies})
        self.storage.copy_pages(copies)
        self.storage.exchange(turns, plan, tables)
        if self.tables.host is not None:
            self.tables.host.loads.end()
        for turn, pages in zip(turns, tables, strict=True):
            self.tables.end_chunk(turn, pages)

    def finish(self, name: str) -> None:
        """A request leaves; what it computed stays in the tree."""
        request, arrived = self.tables.known(name), self.tables.transfers.arrived(name)
        self.tables.finish(name)
        if arrived is not None:  # nobody wrote over it in the meantime
            self.landing.compare(name, request, arrived)

    def abort(self, name: str) -> None:
        """A request leaves; what is its own is freed."""
        self.tables.abort(name)

    def evict(self, wanted: Evict) -> None:
        """Evict until a lane has so many free pages (L3)."""
        most = self.history.pages_per_lane
        if wanted.lane >= self.history.world_size or wanted.free > most:
            raise InvalidInput(
                "eviction",
                expected=f"a lane below {self.history.world_size}, at most {most} pages",
                received=f"{wanted.free} pages of lane {wanted.lane}",
            )
        self.tables.make_room([wanted.lane] * wanted.free)

    def send(self, wanted: Send) -> None:
        """The next chunk of a request goes to decode, from all ranks (T1–T5)."""
        request = self.tables.known(wanted.request)
        self._land(wanted, self.tables.transfers.send(wanted, request))

    def resend(self, wanted: Resend) -> None:
        """What was lost of some ranks goes to decode again."""
        self.tables.known(wanted.request)
        self._land(wanted, self.tables.transfers.resend(wanted.request, wanted.ranks))

    def _land(self, wanted: Send | Resend, parcels: Sequence[Parcel]) -> None:
        name, transfers = wanted.request, self.tables.transfers
        if self.tables.host is not None:
            self.tables.host.loads.settle(self.tables.known(name).pages)
        self.landing.land(parcels)
        self.storage.findings += transfers.of(name).compare_missing(name, wanted.missing)
        arrived = transfers.arrived(name)
        if arrived is not None:
            self.landing.compare(name, self.tables.known(name), arrived)

    def cancel(self, name: str) -> None:
        """The transfer of a request ends on both sides, without success."""
        self.tables.known(name)
        self.tables.transfers.cancel(name)

    # -- host cache and storage --------------------------------------------------------------------------

    def backup(self, wanted: Backup) -> None:
        """Tokens of a request go to the host cache (H2)."""
        request = self.tables.known(wanted.request)
        self._host.back_up(wanted.request, request, wanted.first, wanted.stop, self.tables.now)

    def drop_host(self, wanted: DropHost) -> None:
        """Host pages of a lane are evicted (H4)."""
        self._host.drop(wanted)

    def prefetch(self, wanted: Prefetch) -> None:
        """The first pages of a prompt come from storage into the host cache (H3)."""
        self._host.prefetch(wanted, self.tables.once_known(wanted.request), self.tables.now)

    def spoil(self, wanted: Spoil) -> None:
        """A file in storage goes bad."""
        request = self.tables.once_known(wanted.request)
        self._host.spoil(wanted.request, request, wanted.page, wanted.cache, wanted.how)

    @property
    def _host(self) -> HostTables:
        if self.tables.host is None:
            raise InvalidInput("host cache", expected="one, for this operation", received="none")
        return self.tables.host

    def close(self) -> None:
        """Remove what the engine has on disk."""
        if self.hosting is not None:
            self.hosting.close()
