"""Transfers to decode, as every rank knows them: who sends what, what came, what is under way (laws T1–T5).

While a transfer is under way its request keeps its pages: it may compute its next chunk, but neither decode,
nor finish, nor abort. A message that was lost is read again from the pages it names, so they must stay what
they were. ``cancel`` ends a transfer without success. Bytes are in :mod:`sim.engine.landing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid
from sim.engine.decode_server import DecodeServer
from sim.engine.request import Request
from sim.engine.transfer import Parcel, Transfer, in_words
from sim.histories.history import History, Resend, Send


class Transfers:
    """The transfers of all requests that have not left, and decode's pages.

    Each change happens whole or not at all (X3). Decode holds the pages of a request until it leaves or its
    transfer is cancelled.
    """

    def __init__(self, history: History) -> None:
        self.grid = Grid(history.world_size, history.page_size)
        self.overlap = int(history.bigram)  # tokens beyond a page that its keys need
        self.decode = DecodeServer(history)
        self._transfers: dict[str, Transfer] = {}

    def send(self, wanted: Send, request: Request) -> list[Parcel]:
        """The next chunk of a request; with the first, decode makes pages ready for all its tokens (T4)."""
        begun = self._transfers.get(wanted.request)
        with _named(wanted.request):
            transfer = deepcopy(begun) or Transfer(
                request, self.grid, self.decode.offer(request), self.overlap
            )
            parcels = transfer.send(request, wanted)
        if begun is None:
            self.decode.make_ready(transfer.registration)
        self._keep(wanted.request, request, transfer)
        return parcels

    def resend(self, wanted: Resend, request: Request) -> list[Parcel]:
        """What was lost of some ranks arrives after all."""
        transfer = deepcopy(self.of(wanted.request))
        with _named(wanted.request):
            parcels = transfer.resend(wanted.ranks)
        self._keep(wanted.request, request, transfer)
        return parcels

    def _keep(self, name: str, request: Request, transfer: Transfer) -> None:
        """What a transfer is now; when all has come, decode begins."""
        self._transfers[name] = transfer
        if transfer.receiver.done():
            registration = transfer.registration
            self.decode.begin(name, registration.pages, request.ids[: registration.tokens])

    def cancel(self, name: str) -> None:
        """End a transfer that is under way; decode's pages are free."""
        transfer = self.of(name)
        with _named(name):
            transfer.cancel()
        self.decode.leave(name, transfer.registration.pages)

    def leave(self, name: str) -> None:
        """A request leaves: decode's pages of it are free."""
        transfer = self._transfers.pop(name, None)
        if transfer is not None and not transfer.cancelled:
            self.decode.leave(name, transfer.registration.pages)

    def require_settled(self, name: str) -> None:
        """Refuse what would change the pages of a request while they are on their way."""
        transfer = self._transfers.get(name)
        if transfer is not None and transfer.under_way:
            raise InvalidInput(
                "request",
                expected="one whose pages are not on their way to decode",
                received=f"missing: {in_words(transfer.receiver.missing())}",
                where=Where(request=name),
                fix="Send the rest, or cancel the transfer.",
            )

    def of(self, name: str) -> Transfer:
        """The transfer of a request. :class:`InvalidInput` if nothing of it was sent."""
        if name not in self._transfers:
            raise InvalidInput(
                "transfer", expected="one that was begun", received="none", where=Where(request=name)
            )
        return self._transfers[name]

    def check(self, requests: Mapping[str, Request]) -> list[Finding]:
        """Where the laws of a transfer do not hold. None, unless broken."""
        if not self._transfers and not self.decode.lanes.held(0):
            return []
        found = [each for name, its in self._transfers.items() for each in its.check(name, requests[name])]
        under_way = [
            its for name, its in self._transfers.items() if not its.cancelled and not self.decode.has(name)
        ]
        return [*found, *self.decode.check([page for its in under_way for page in its.registration.pages])]

    def fingerprint(self) -> tuple[object, ...]:
        """All state, as integers: equal on every rank after every step."""
        return self.decode.fingerprint(), *(each.fingerprint() for each in self._transfers.values())


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Within the block a refusal names the request by its name, not its number."""
    try:
        yield
    except InvalidInput as refused:
        raise InvalidInput(
            refused.what,
            expected=refused.expected,
            received=refused.received,
            where=replace(refused.where, request=name),
            fix=refused.fix,
        ) from refused
