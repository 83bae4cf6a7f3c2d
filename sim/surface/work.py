"""What a program holds of a call that is not finished: torch's ``Work``, over whatever carries the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sim.surface.operations import Operation


class Pending(Protocol):
    """An operation under way. torch's own ``Work`` is one too."""

    def wait(self) -> Any:
        """Return when what the operation receives is there, and what it sends may be changed."""

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def _source_rank(self) -> int:
        """Of a message from any rank, once it is there: from whom."""


class Completed:
    """An operation that is finished, or that was not carried at all."""

    def __init__(self, operation: Operation) -> None:
        self._peer = operation.peer

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def _source_rank(self) -> int:
        return self._peer


class Joined:
    """Several operations as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def _source_rank(self) -> int:
        return -1


class IssuedWork(dist.Work):
    """torch's view of an operation under way; its result are the tensors it receives.

    ``finished`` is called once, when the operation was first waited for.
    """

    def __init__(
        self, pending: Pending, received: Sequence[torch.Tensor], finished: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._received = received
        self._pending = pending
        self._finished = finished
        self._is_over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_over:
            self._pending.wait()
            self._is_over = True
            if self._finished is not None:
                self._finished()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_over or self._pending.is_completed()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        """A failed operation ends its run; there is nobody left to ask."""

    def result(self) -> list[torch.Tensor]:
        return list(self._received)

    def _source_rank(self) -> int:
        return self._pending._source_rank()

    def source_rank(self) -> int:
        return self._pending._source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """torch's own future, where torch carries the operation; else one that is there on return.

        C++ waits for futures beneath Python, as DistributedDataParallel does: nobody could fulfil them then.
        """
        if isinstance(self._pending, dist.Work):
            return self._pending.get_future()
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future
