"""One case, handed over in one way: three runs of the candidate, then the reference, then the judge.

The candidate runs first, so that no recycled memory can hold the answer. It runs on the case, then on other
values in the very same tensors, then on the case again in fresh memory with other poison: an answer that is
remembered, or was there before, is wrong at one of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from properties.kernels import faults
from properties.kernels.cases.case import Case
from properties.kernels.guarded import Guarded, filled, memory_for, room_for, stain
from properties.kernels.handling import PLAIN, Handling
from properties.kernels.streams import busy_stream
from refmodel.errors import Finding
from refmodel.ops.op import Arguments, Op, Results
from sim.kernels.candidate import Candidate, NotResults

OTHER_VALUES = "with other values in the same tensors"  # the case of the next seed
AGAIN = "again, with other poison in memory"  # and on a GPU, on a stream of its own
_REPEATS = 4  # of one that is declared deterministic

# Entered whenever the candidate runs: what happens in there is its doing.
Running = Callable[[], AbstractContextManager[object]]


class Faulty(Exception):
    """A fault that shows without any judge."""

    def __init__(self, kind: str, what: str, expected: str, received: str) -> None:
        super().__init__(kind)
        self.finding = Finding(kind, what, expected, received)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of the candidate brought about."""

    arguments: Arguments  # as they were
    outcome: Results = ()  # all that it made or wrote, copied at once
    results: Results = ()  # as the candidate gave them
    fault: Finding | None = None  # that shows without any judge
    name: str = ""  # of the run, for a reader


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate on a device, ready for cases."""

    candidate: Candidate
    device: str = "cpu"
    running: Running = nullcontext

    @property
    def op(self) -> Op:
        return self.candidate.op

    def once(self, case: Case, handling: Handling) -> Finding | None:
        """The first fault of one case; None if there is none.

        Whatever the case or the reference raises is raised: it is no fault of the candidate's.
        """
        runs = []
        for run in self.runs(case, handling):
            if run.fault is not None:
                return run.fault
            runs.append(run)
        return self._judged(runs)

    def alone(self, case: Case) -> Finding | None:
        """The fault of a case that is too large for more than one run; it is judged on the device, too."""
        run = self.run(self._there(case.arguments()), home=self.device)
        return run.fault or self._judged([run])

    def run(self, arguments: Arguments, *, home: str = "cpu") -> Run:
        """One run, in the plainest way. ``home``: where the outcome is to be."""
        return self._run(arguments, memory_for(arguments, PLAIN, device=self.device), PLAIN, 0, home=home)

    # -- the candidate's runs ------------------------------------------------------------------------------

    def runs(self, case: Case, handling: Handling) -> Iterator[Run]:
        """Each run as it was made. One with a fault may be the last that is worth having."""
        first = handling.values(self.op, case.arguments())
        other = handling.values(self.op, replace(case, seed=case.seed + 1).arguments())
        memory = memory_for(first, handling, poison=0, device=self.device)
        earlier = self._run(first, memory, handling, 0)
        yield earlier
        if not _alike(first, other):
            memory = memory_for(other, handling, poison=0, device=self.device)
        run = self._run(other, memory, handling, 0, OTHER_VALUES)
        yield replace(run, fault=run.fault or _overwritten(earlier))
        memory = memory_for(first, handling, poison=1, device=self.device)
        # Of one that is declared deterministic, the last run is repeated.
        for _ in range(1 + (_REPEATS if self.candidate.capabilities.deterministic else 0)):
            yield self._run(first, memory, handling, 1, AGAIN)

    def _run(
        self,
        arguments: Arguments,
        memory: dict[str, Guarded],
        handling: Handling,
        poison: int,
        name: str = "",
        home: str = "cpu",
    ) -> Run:
        """``home``: where the outcome is to be judged; the arguments are there, too."""
        there = self._there(arguments)
        # Ranks on one GPU exchange what is on the stream that they share.
        late = name == AGAIN and not self.op.collective
        with busy_stream(self.device if late else "cpu"):
            given = filled(memory, there)
            out = self._out(arguments, handling, poison)
            try:
                results, copies = self._call(given, None if out is None else tuple(one.view for one in out))
                self._check_kinds(arguments, results)
                self._check_memory(memory, out or (), results)
            except Faulty as faulty:
                return Run(arguments, fault=faulty.finding, name=name)
        return Run(arguments, tuple(tensor.to(home) for tensor in copies), results, name=name)

    def _there(self, arguments: Arguments) -> Arguments:
        """On the device, so that to copy them into their memory is a matter of its stream."""
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }

    def _call(self, given: Arguments, out: Results | None) -> tuple[Results, Results]:
        """Results as given, and copies of the whole outcome."""
        try:
            with self.running(), torch.no_grad():
                results = self.candidate.run(given, out)
                # At once, and in order with what is queued on this stream: work on another one is too late.
                copies = tuple(one.clone() for one in self.op.outcome(given, results))
                if self.device == "cuda":
                    torch.cuda.synchronize()
        except NotResults as error:
            expected = ", ".join(f"{said.name} {said.shape}" for said in self.op.results)
            raise Faulty(faults.RESULTS, "what came back", expected, str(error)) from error
        except torch.OutOfMemoryError:  # others share the GPU: nobody knows whose fault it is
            raise
        except BaseException as error:  # SystemExit is one way of not giving results, too
            raise _raised(error) from error
        return results, copies

    def _out(self, arguments: Arguments, handling: Handling, poison: int) -> tuple[Guarded, ...] | None:
        if handling.out:
            return room_for(self.op, arguments, handling, poison=poison, device=self.device)
        for space in self.op.spaces(**arguments):  # so that memory which is recycled has no answer in it
            _leave_poison(space.shape, space.dtype, self.device, poison)
        return None

    # -- what shows at once --------------------------------------------------------------------------------

    def _check_kinds(self, arguments: Arguments, results: Results) -> None:
        for space, result, said in zip(self.op.spaces(**arguments), results, self.op.results, strict=True):
            device = torch.device(self.device).type
            if tuple(result.shape) != space.shape:
                raise Faulty(faults.SHAPE, said.name, f"{list(space.shape)}", f"{list(result.shape)}")
            if result.dtype != space.dtype:
                raise Faulty(faults.DTYPE, said.name, str(space.dtype), str(result.dtype))
            if result.device.type != device:
                raise Faulty(faults.DEVICE, said.name, device, result.device.type)

    def _check_memory(self, memory: dict[str, Guarded], out: tuple[Guarded, ...], results: Results) -> None:
        for name, place in memory.items():
            if place.changed:
                _refuse_strays(name, place)
                if name not in self.op.written:
                    raise Faulty(faults.CHANGED, name, "as it was", "changed")
            for result, said in zip(results, self.op.results, strict=True):
                if place.owns(result):
                    raise Faulty(faults.SHARED, said.name, "memory of its own", f"that of {name}")
        for place, said in zip(out, self.op.results, strict=bool(out)):
            _refuse_strays(f"out ({said.name})", place)

    # -- the judge's turn ----------------------------------------------------------------------------------

    def _judged(self, runs: list[Run]) -> Finding | None:
        """The first fault that the judge finds in any run; then whether equal runs gave equal bits."""
        for number, run in enumerate(runs[:3]):
            if number == 2 and _unequal(runs[0], run) is None:
                continue  # it has been judged
            expected = self._expected(run.arguments)
            finding = self.op.judge(run.arguments, run.outcome, expected)
            if number == 0:  # NaN: nothing is promised there
                promised = tuple(~tensor.isnan() for tensor in expected)
            for tensor in expected:  # nothing right is to lie about where a next run may find it
                _scrub(tensor)
            if finding is not None:
                return replace(finding, what=f"{finding.what}, {run.name}" if run.name else finding.what)
        return next(filter(None, (_unequal(runs[2], more, promised) for more in runs[3:])), None)

    def _expected(self, arguments: Arguments) -> Results:
        working = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        return self.op.outcome(working, self.op.reference(**working))


def _unequal(one: Run, other: Run, promised: tuple[torch.Tensor, ...] | None = None) -> Finding | None:
    """Whether two runs gave other bits where anything is promised; None: everywhere."""
    for number, (first, second) in enumerate(zip(one.outcome, other.outcome, strict=True)):
        if promised is not None:
            first, second = first[promised[number]], second[promised[number]]
        if not torch.equal(_bytes(first), _bytes(second)):
            what = f"tensor {number} of the outcome"
            return Finding(faults.REPEAT, what, "the same bits every time", "other bits at times")
    return None


def _alike(one: Arguments, other: Arguments) -> bool:
    """Whether the values of one fit into the tensors of the other, and all else is equal."""
    return all(
        (value.shape, value.dtype) == (other[name].shape, other[name].dtype)
        if isinstance(value, torch.Tensor)
        else value == other[name]
        for name, value in one.items()
    )


def _overwritten(run: Run) -> Finding | None:
    """Whether a result of an earlier run is another now."""
    then = run.outcome[len(run.outcome) - len(run.results) :]
    for number, (result, copy) in enumerate(zip(run.results, then, strict=True)):
        if not torch.equal(_bytes(result), _bytes(copy)):
            return Finding(faults.OVERWRITTEN, f"result {number}", "as it was", "changed by the next call")
    return None


def _refuse_strays(name: str, place: Guarded) -> None:
    for distance in place.strays():
        size = place.view.numel() * place.view.element_size()
        raise Faulty(
            faults.OUTSIDE,
            f"memory around {name}, whose elements are {size} bytes",
            "untouched",
            f"written {distance} bytes from its first element",
        )


def _leave_poison(shape: tuple[int, ...], dtype: torch.dtype, device: str, poison: int) -> None:
    """Fill memory of this size and give it back, so that the next to ask for some gets that."""
    blocks = [torch.empty(shape, dtype=dtype, device=device) for _ in range(3)]
    for block in blocks:
        stain(block, poison)


def _scrub(tensor: torch.Tensor) -> None:
    """Overwrite all memory that a tensor is a view of."""
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(0xA5)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # an expanded one has no strides to view bytes by
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


def _raised(error: BaseException) -> Faulty:
    """With the traceback from the candidate on."""
    frames = error.__traceback__
    own = {__name__, Candidate.__module__}
    while frames is not None and frames.tb_next and frames.tb_frame.f_globals.get("__name__") in own:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return Faulty(faults.RAISES, type(error).__name__, "results", text)
