"""When a page is due for backup: as it is hit, or as it leaves the device. Each page once (law H5).

>>> counts = HitCounts(WritePolicy.WRITE_THROUGH_SELECTIVE)
>>> [counts.hit([7, 8]), counts.hit([7, 9]), counts.leave([8])]
[(), (0,), ()]
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum


class WritePolicy(Enum):
    """What makes a page due for backup."""

    WRITE_THROUGH = "write_through"  # its first hit
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # its second hit
    WRITE_BACK = "write_back"  # that it leaves the device


_HITS = {WritePolicy.WRITE_THROUGH: 1, WritePolicy.WRITE_THROUGH_SELECTIVE: 2}


class HitCounts:
    """Hits of the pages on the device, by key. Changed by :meth:`hit` and :meth:`leave`.

    What they return is valid until the host cache changes: a page that has a host copy is not due.
    """

    def __init__(self, policy: WritePolicy) -> None:
        self.policy = policy
        self._hits: dict[int, int] = {}

    def hit(self, keys: Sequence[int], backed_up: Container[int] = ()) -> tuple[int, ...]:
        """Count a hit on each page; indices into ``keys`` of those due for backup."""
        for key in keys:
            self._hits[key] = self._hits.get(key, 0) + 1
        needed = _HITS.get(self.policy)
        if needed is None:
            return ()
        return tuple(i for i, key in enumerate(keys) if self._hits[key] >= needed and key not in backed_up)

    def leave(self, keys: Sequence[int], backed_up: Container[int] = ()) -> tuple[int, ...]:
        """Pages are about to leave the device: forget their hits; indices of those due for backup first."""
        for key in keys:
            self._hits.pop(key, None)
        if self.policy is not WritePolicy.WRITE_BACK:
            return ()
        return tuple(i for i, key in enumerate(keys) if key not in backed_up)

    def fingerprint(self) -> tuple[tuple[int, int], ...]:
        """The whole state: (key, hits), by key."""
        return tuple(sorted(self._hits.items()))
