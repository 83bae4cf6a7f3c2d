"""A target against the contract: one verdict an operation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Lock

import torch
from msgspec.structs import replace as with_fields

from properties.kernels import faults
from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from properties.kernels.child import Done, NoRoom, Task, Troubled
from properties.kernels.handling import PLAIN
from properties.kernels.known import Known
from properties.kernels.selection import fits, size_of, some_cases
from properties.kernels.speed import Speed
from properties.kernels.tried import Counterexample, Tried
from properties.kernels.verdicts import Failure, Timing, Verdict, failure_of
from properties.kernels.watched import Children, Ended
from refmodel.errors import InvalidInput
from refmodel.ops.catalogue import OPS
from refmodel.ops.declare import Capabilities
from sim.failures import WorldUnavailable
from sim.kernels.target import known_op

EXAMPLES = 40
LIMIT = 60.0  # seconds a call may take; the first may compile
_SMALLER = 40  # cases that are tried to make a crash smaller


@dataclass(frozen=True, slots=True)
class Plan:
    """What to check, and how."""

    target: str
    ops: tuple[str, ...] = ()  # empty: all that the target has
    device: str = ""  # empty: the GPU if there is one and it is declared, else the CPU
    world: str = ""  # of collectives; empty: lockstep
    examples: int = EXAMPLES
    seed: int = 0
    case: Case | None = None  # try only this one, in every way
    limit: float = LIMIT
    known: tuple[Known, ...] = ()
    timed: bool = False
    jobs: int = 1  # operations that are tried beside each other

    @property
    def op(self) -> str | None:
        """The operation that a function is said to be."""
        return self.ops[0] if len(self.ops) == 1 and ":" in self.target else None

    @property
    def options(self) -> str:
        """Those of the command that a replay needs, too."""
        device = [f"--device {self.device}"] if self.device else []
        return " ".join([*device, *([f"--world {self.world}"] if self.world else [])])


@dataclass
class Check:
    """A plan that is carried out. Iterating gives verdicts, in the order of :attr:`ops`.

    ``children``: the processes of one operation at a time. Those of others are started when they are needed.
    """

    plan: Plan
    children: Children
    failed: list[Case] = field(default_factory=list)  # counterexamples, for those who export them
    speeds: list[Speed] = field(default_factory=list)  # of what passed, if that was asked for
    _room: Lock = field(default_factory=Lock)  # on the GPU, for one case of gigabytes at a time

    def __post_init__(self) -> None:
        loaded = self.children.loaded()
        self.capabilities: Mapping[str, Capabilities] = loaded.capabilities
        self.near_misses = dict(loaded.near_misses)
        self.ops = self._chosen()

    def _chosen(self) -> tuple[str, ...]:
        for op in self.plan.ops:
            known_op(op, what="--op")
            if op not in self.capabilities:
                raise InvalidInput(
                    "--op", expected=f"of {self.plan.target}: {', '.join(self.capabilities)}", received=op
                )
        return tuple(op for op in OPS if op in (self.plan.ops or self.capabilities))

    @property
    def lacking(self) -> list[str]:
        """Operations that the target does not have."""
        return [op for op in OPS if op not in self.capabilities]

    def __iter__(self) -> Iterator[Verdict]:
        jobs = max(1, min(self.plan.jobs, len(self.ops)))
        free = SimpleQueue[Children]()
        with ExitStack() as others, ThreadPoolExecutor(jobs) as pool:
            free.put(self.children)
            for _ in range(jobs - 1):
                free.put(others.enter_context(self.children.beside()))

            def tried(op: str) -> Verdict:
                children = free.get()
                try:
                    return self.verdict(op, children)
                finally:
                    free.put(children)

            yield from pool.map(tried, self.ops)

    def verdict(self, op: str, children: Children | None = None) -> Verdict:
        """Try one operation, in the processes of ``children``; by default its own."""
        start = time.perf_counter()
        capabilities = self.capabilities[op]
        device, missing = device_for(self.plan.device, capabilities)
        if op not in CASES:
            missing = "there are no cases of it"
        if missing:
            return Verdict(op, "unknown", missing, capabilities.declared, 0, 0, 0.0)
        verdict = self._tried(op, device, children or self.children)
        verdict = with_fields(
            verdict, declared=capabilities.declared, seconds=round(time.perf_counter() - start, 3)
        )
        return known_or_not(verdict, self.plan.known)

    def _tried(self, op: str, device: str, children: Children) -> Verdict:
        plan, huge = self.plan, CASES[op].huge()
        task = Task(op, device, plan.world, plan.examples, plan.seed, timed=plan.timed)
        if plan.case is not None:
            way = PLAIN if plan.case == huge else None
            return self._asked(replace(task, only=((plan.case, way),)), children)
        verdict = self._asked(task, children)
        if verdict.verdict != "pass" or device != "cuda" or huge is None:
            return verdict
        if not fits(huge, self.capabilities[op]):
            return _passed_but(verdict, "no such case is within what is declared")
        with self._room:
            last = self._asked(replace(task, only=((huge, PLAIN),), timed=False), children)
        if last.verdict == "unknown":
            return _passed_but(verdict, last.why)
        both = {"cases": verdict.cases + 1, "attempts": verdict.attempts + 1}
        return with_fields(verdict if last.verdict == "pass" else last, **both)

    def _asked(self, task: Task, children: Children) -> Verdict:
        try:
            answer = children.ask(task)
        except WorldUnavailable as error:
            return _unknown(task.op, str(error))
        if isinstance(answer, Ended):
            return self._ended(task, answer, children)
        if isinstance(answer, Troubled):
            return _unknown(task.op, f"the kit failed:\n{answer.text}")
        if isinstance(answer, NoRoom):
            return _unknown(task.op, answer.text)
        return self._answered(task.op, answer)

    def _answered(self, op: str, answer: Done) -> Verdict:
        tried = answer.tried
        if tried.counterexample is not None:
            return self._failed(op, tried, tried.counterexample)
        if not tried.cases:
            return _unknown(op, "no case within the declared capabilities")
        why = f"not tried: {tried.untried}" if tried.untried else ""
        timing = None
        if answer.speed is not None:
            self.speeds.append(answer.speed)
            timing = _timing(answer.speed)
        return Verdict(op, "pass", why, {}, tried.cases, tried.attempts, 0.0, timing=timing)

    def _failed(self, op: str, tried: Tried, found: Counterexample) -> Verdict:
        self.failed.append(found.case)
        failure = failure_of(found, self.plan.target, self.plan.options)
        return Verdict(op, "fail", "", {}, tried.cases, tried.attempts, 0.0, failure)

    # -- a candidate that takes its process with it --------------------------------------------------------

    def _ended(self, task: Task, ended: Ended, children: Children) -> Verdict:
        found = ended.counterexample
        if ended.of_memory or found is None:
            return _unknown(task.op, f"the process {ended.received}")
        if not task.only:
            found = self._smaller(task, found, children)
        return self._failed(task.op, Tried(ended.attempts, ended.attempts), found)

    def _smaller(self, task: Task, found: Counterexample, children: Children) -> Counterexample:
        """The smallest case that ends a fresh process, too: small ones first, then the one that did."""
        cases = some_cases(CASES[task.op], self.capabilities[task.op], _SMALLER, self.plan.seed)
        smaller = [(case, PLAIN) for case in cases if size_of(case) < size_of(found.case)]
        tries = (*smaller, (found.case, PLAIN), (found.case, found.handling))
        answer = children.ask(replace(task, only=tries, timed=False), fresh=True)
        if isinstance(answer, Ended) and answer.counterexample is not None:
            return answer.counterexample
        return replace(found, steady=False)


def device_for(wanted: str, capabilities: Capabilities) -> tuple[str, str]:
    """Where to try a kernel, and what is missing for that; nothing is missing if that is empty."""
    declared = capabilities.devices
    device = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if declared and device not in declared:
        if wanted:
            return device, f"declared for {' and '.join(declared)} only"
        device = declared[0]
    missing = "no CUDA GPU" if device == "cuda" and not torch.cuda.is_available() else ""
    return device, missing


def known_or_not(verdict: Verdict, known: Sequence[Known]) -> Verdict:
    """The verdict in the light of what is known to fail."""
    entry = next((one for one in known if one.op == verdict.op), None)
    if entry is None or verdict.verdict == "unknown":
        return verdict
    if verdict.failure is not None:
        if verdict.failure.kind != entry.law:
            return verdict
        return with_fields(verdict, verdict="known", why=entry.reason)
    failure = Failure(
        kind=faults.UNEXPECTED_PASS,
        statement=faults.statement(faults.UNEXPECTED_PASS),
        what=f"{entry.law}, {entry.reason}",
        expected="a failure",
        received="none",
        rank=None,
        handling="",
        steady=True,
        case={},
        code="",
        replay="",
    )
    return with_fields(verdict, verdict="fail", failure=failure)


def _timing(speed: Speed) -> Timing:
    return Timing(
        speed.case,
        speed.device,
        speed.seconds,
        speed.reference_seconds,
        speed.byte_rate,
        speed.flop_rate,
        speed.share,
    )


def _passed_but(verdict: Verdict, why: str) -> Verdict:
    """In all but the case of gigabytes."""
    untried = f"not tried: offsets past 2³¹ bytes, {why}"
    return with_fields(verdict, why=f"{verdict.why}; {untried}" if verdict.why else untried)


def _unknown(op: str, why: str) -> Verdict:
    return Verdict(op, "unknown", why, {}, 0, 0, 0.0)
