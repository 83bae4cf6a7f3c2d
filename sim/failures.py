"""How a run can end without results. Each names the rank, the place, and where the other ranks were."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from refmodel.errors import CpkvError, Where

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sim.surface.recorder import Span


def traceback_text(raised: BaseException, *, skip: str | Collection[str]) -> str:
    """The traceback from the program on, without the outermost frames of the modules ``skip``."""
    modules = (skip,) if isinstance(skip, str) else skip
    frames = raised.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in modules and frames.tb_next:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(raised), raised, frames))


class RunFailed(CpkvError):
    """A run ended without results; nothing of it is left running.

    ``positions`` says where each rank was, in rank order; empty if that is not known. ``schedule`` is the
    token that replays a lockstep run up to here; empty in other worlds. ``spans`` are the calls of each rank
    up to here, for a timeline; a call that did not return lasts to the end. Empty where nobody knows.

    >>> print(Deadlock("lockstep:2", expected="every rank returns", received="rank 1 waits for ever",
    ...                positions=("finished", "waits in #0 kv.view: all_gather [4, 2] float32")))
    lockstep:2: expected every rank returns, got rank 1 waits for ever
      rank 0: finished
      rank 1: waits in #0 kv.view: all_gather [4, 2] float32
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object,
        received: object,
        where: Where | None = None,
        fix: str = "",
        positions: Sequence[str] = (),
    ) -> None:
        super().__init__(what, expected=expected, received=received, where=where, fix=fix)
        self.positions = tuple(positions)
        self.schedule = ""
        self.spans: tuple[tuple[Span, ...], ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank at fault, if there is one."""
        return self.where.rank

    def __str__(self) -> str:
        lines = [super().__str__()]
        lines += [f"  rank {rank}: {position}" for rank, position in enumerate(self.positions)]
        if self.schedule:
            lines.append(f"  schedule: {self.schedule}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # What the constructor of the root does not know travels as state.
        return (*super().__reduce__(), self.__dict__)


class RankFailed(RunFailed):
    """One rank raised, or its process died; the others were ended.

    ``rank`` is that rank; ``traceback`` is its text, empty if the process died without a word. In a
    lockstep world ``__cause__`` is the exception itself.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object,
        received: object,
        where: Where | None = None,
        fix: str = "",
        positions: Sequence[str] = (),
        traceback: str = "",
    ) -> None:
        super().__init__(
            what, expected=expected, received=received, where=where, fix=fix, positions=positions
        )
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.traceback}".rstrip()


class Deadlock(RunFailed):
    """No rank can go on, and some wait: each waits for a rank that waits elsewhere or has finished."""


class Diverged(RunFailed):
    """Law V6: the ranks did not issue the same ordered list of collectives."""


class TimedOut(RunFailed):
    """A time limit passed; ``positions`` are the last calls that were heard of."""


class InfrastructureFailed(RunFailed):
    """What a program runs on broke, before or beneath it; nothing is said about the program.

    A World runs the program once more, and says so (:class:`RetryWarning`). What counts:

    - a worker process ends or falls silent while its world starts, or its rendezvous fails;
    - a worker process ends before it has the program, or after it has handed over its result;
    - a process is killed by SIGKILL while this machine's count of out-of-memory kills goes up;
    - a connection between ranks breaks although every rank is alive and within the program.

    A process that dies in the program by any other cause is RankFailed, whatever the signal: a program can
    bring that about, and a second try would hide it.
    """


class RetryWarning(UserWarning):
    """A run was tried a second time, because what it ran on had broken; the message says how."""


class WorldUnavailable(RunFailed):
    """This machine, or this world, cannot do what was asked; the message says what is missing."""


class Nondeterministic(RunFailed):
    """Two runs of one schedule differed: something that the schedule does not control had a say."""
