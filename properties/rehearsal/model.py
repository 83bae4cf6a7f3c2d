"""All that the model knows, beside the engine that it judges."""

from __future__ import annotations

from collections.abc import Sequence

from properties.rehearsal.dry import DryEngine
from properties.rehearsal.host_model import HostModel
from properties.rehearsal.transfer_model import TransferModel
from properties.rehearsal.tree_model import TreeModel
from sim.engine.request import Phase, Request
from sim.histories.history import History


class Model:
    """The engine and the models of its tree, its host cache and its transfers."""

    def __init__(self, history: History) -> None:
        self.setting = history
        self.P, self.W = history.page_size, history.world_size
        self.engine = DryEngine(history)
        self.tables = self.engine.tables
        self.tree = TreeModel(self.tables.tree, history)
        self.transfers = TransferModel(history)
        host = self.tables.host
        self.host = None if host is None else HostModel(history, host.host, self.engine.files)

    @property
    def running(self) -> dict[str, Request]:
        return self.tables.requests

    @property
    def seen(self) -> dict[str, Request]:
        """Also those that have left."""
        return self.tables.seen

    def names(self, phase: Phase | None = None) -> list[str]:
        """Requests that have not left, in order of submission."""
        return [name for name, request in self.running.items() if phase in (None, request.phase)]

    def settled(self, name: str) -> Request | None:
        """A request that may leave or decode as far as decode is concerned; None if it may not (T5)."""
        return None if self.transfers.is_under_way(name) else self.running.get(name)

    def free_pages(self) -> tuple[int, ...]:
        """[W] of each lane."""
        return self.tables.lanes.all_free()

    def own_pages(self, request: Request, first: int = 0) -> Sequence[int]:
        """Pages of a request from a position on that are not the tree's."""
        return [page for page in request.pages[first:] if page not in self.tree.contents]
