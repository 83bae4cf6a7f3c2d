"""What one rank does with the bytes of its pages for the host cache (laws H1, H5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from refmodel.serving.host_moves import Fill, Landing


class Bytes(Protocol):
    """What one rank does with the bytes of its pages."""

    def back_up(self, fill: Fill, pages: Sequence[int]) -> None:
        """Device pages that this rank owns to its host pages, and to its storage."""

    def bring(self, landing: Landing, cache: str, layer: int) -> None:
        """One layer of a cache of a load to the device."""

    def available(self, keys: Sequence[int], lanes: Sequence[int]) -> int:
        """Leading pages that the storage of all ranks has: agreed on by all."""

    def fetch(self, fill: Fill, keys: Sequence[int], arrived: Mapping[str, int]) -> None:
        """Files of this rank to its host pages: of each cache the first so many moves."""

    def spoil(self, key: int, cache: str, how: str) -> None:
        """A file of this rank goes bad."""


class NoBytes:
    """Of tables that stand alone: nothing is moved, and storage has all that it was given."""

    def back_up(self, fill: Fill, pages: Sequence[int]) -> None: ...

    def bring(self, landing: Landing, cache: str, layer: int) -> None: ...

    def available(self, keys: Sequence[int], lanes: Sequence[int]) -> int:
        return len(lanes)

    def fetch(self, fill: Fill, keys: Sequence[int], arrived: Mapping[str, int]) -> None: ...

    def spoil(self, key: int, cache: str, how: str) -> None: ...
