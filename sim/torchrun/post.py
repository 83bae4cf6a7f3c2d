"""What the ranks of a started world tell each other, past their group: through the store that they met at.

All send to rank 0, and rank 0 announces to all. The store is torch's TCPStore; no value in it may be longer
than 8 MiB, so longer ones travel in parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from torch._C._distributed_c10d import Store

_PART_BYTES = 4 << 20
_HEADER = struct.Struct(">I?")  # the sender's rank; whether this is the last part

_INBOX, _BEAT = "inbox", "beat"


class Post:
    """One rank's access. Every method may raise RuntimeError: the store is gone, and its host with it."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = another_connection(store)
        self._rank = rank
        self._parts: dict[int, list[bytes]] = {}

    def send(self, letter: bytes) -> None:
        """To rank 0. Letters of one rank arrive in order."""
        starts = range(0, max(len(letter), 1), _PART_BYTES)
        for start in starts:
            header = _HEADER.pack(self._rank, start == starts[-1])
            self._store.queue_push(_INBOX, header + letter[start : start + _PART_BYTES])

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """What has come for rank 0, with the senders. Only rank 0 may call it."""
        for _ in range(self._store.queue_len(_INBOX)):
            item = self._store.queue_pop(_INBOX)
            sender, is_last = _HEADER.unpack_from(item)
            parts = self._parts.setdefault(sender, [])
            parts.append(item[_HEADER.size :])
            if is_last:
                yield sender, b"".join(self._parts.pop(sender))

    def announce(self, name: str, letter: bytes) -> None:
        """To all, under a new name."""
        starts = range(0, max(len(letter), 1), _PART_BYTES)
        for number, start in enumerate(starts):
            part: Any = letter[start : start + _PART_BYTES]  # the stub knows only str
            self._store.set(f"{name}/{number}", part)
        self._store.set(name, str(len(starts)))

    def announced(self, name: str) -> bytes | None:
        """What rank 0 has announced under this name; None if it has not yet."""
        if not self._store.check([name]):
            return None
        return b"".join(self._store.get(f"{name}/{number}") for number in range(int(self._store.get(name))))

    def withdraw(self, name: str) -> None:
        """Forget what was announced under this name; all must have read it."""
        if self._store.check([name]):
            for number in range(int(self._store.get(name))):
                self._store.delete_key(f"{name}/{number}")
            self._store.delete_key(name)

    def beat(self) -> None:
        """Rank 0 says that it is there."""
        self._store.add(_BEAT, 1)

    def beats(self) -> int:
        """How often rank 0 has said so."""
        return int(self._store.add(_BEAT, 0))


def another_connection(store: Store) -> Store:
    """To the same store. A connection serves one wait at a time, and the others wait for that."""
    clone: Store = store.clone()  # type: ignore[attr-defined]  # missing in the stub
    return clone
