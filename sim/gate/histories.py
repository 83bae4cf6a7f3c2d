"""One history on one world, judged: what each rank found, and whether all of them did the same (law L7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from refmodel.collectives import Call
from refmodel.errors import Finding, Where
from sim.engine.play import Played, play
from sim.engine.start import Refusal, start
from sim.failures import RunFailed, WorldUnavailable
from sim.gate.judge import fallbacks_unwarned, finding_of, folded, run_quietly
from sim.gate.setting import PLAIN, Setting
from sim.histories.history import History
from sim.kernels.uses import NO_USES, Uses
from sim.surface.group import Span
from sim.world import World

T = TypeVar("T")

REFUSAL = "refusal"  # stands where a law would: which one a refusal is about, only its text says


@dataclass(frozen=True, slots=True, eq=False)
class HistoryVerdict:
    """What came of a history."""

    findings: tuple[Finding, ...]
    played: tuple[Played, ...] = ()  # of each rank; none if the run ended without results
    ledgers: tuple[tuple[Call, ...], ...] = ((),)
    spans: tuple[tuple[Span, ...], ...] = ()
    schedule: str = ""  # the token that replays it; of lockstep only
    retried: bool = False
    uses: Uses = NO_USES  # of kernels, by all ranks

    fallbacks = 0  # a history does not say how rows are written

    @property
    def digest(self) -> str:
        """Of every view: the same on every rank, world and run; empty if there is none."""
        return self.played[0].digest if self.played else ""

    @property
    def rows_checked(self) -> int:
        return sum(each.rows_checked for each in self.played)

    @property
    def calls(self) -> int:
        """Collectives that a rank issued."""
        return len(self.ledgers[0])


def try_history(world: World, history: History, setting: Setting = PLAIN) -> HistoryVerdict:
    """Play a history and judge it. A run that fails is a finding; a world that is missing is an error."""
    try:
        if history.refused_at_start is not None:
            return _try_start(world, history, setting)
        run, uses = run_quietly(world, _play_unwarned, history, setting)
    except WorldUnavailable:
        raise
    except RunFailed as failure:
        return HistoryVerdict((finding_of(failure),), spans=failure.spans, schedule=failure.schedule)
    findings = tuple(judge_history(history, run.results))
    return HistoryVerdict(findings, run.results, run.ledgers, run.spans, run.schedule, run.retried, uses)


def _try_start(world: World, history: History, setting: Setting) -> HistoryVerdict:
    """Start a server that must refuse its settings; no step is played."""
    run, _ = run_quietly(world, start, history, setting)
    findings = tuple(judge_start(history, run.results))
    return HistoryVerdict(findings, (), run.ledgers, run.spans, run.schedule, run.retried)


def judge_start(history: History, refusals: Sequence[Refusal | None]) -> Iterator[Finding]:
    """Every rank's server must refuse the setting that the history names, for one reason (X1)."""
    expected = f"a refusal of {history.refused_at_start}"
    for rank, refusal in enumerate(refusals):
        if refusal is None or refusal.setting != history.refused_at_start:
            received = refusal.text if refusal else "none: it starts"
            yield Finding("X1", "start of the server", expected, received, Where(rank=rank))
            return
    odd = _unlike_the_first(refusals)
    if odd:
        yield Finding(
            "X1", "start of the server", "rank 0's refusal", f"another on ranks {odd}", Where(rank=odd[0])
        )


def _play_unwarned(group: dist.ProcessGroup, history: History) -> Played:
    with fallbacks_unwarned():
        return play(group, history)


def judge_history(history: History, played: Sequence[Played]) -> Iterator[Finding]:
    """What ranks found, then where they did not do alike, then what was refused and should not, or not."""
    yield from folded([*dict.fromkeys(finding for each in played for finding in each.findings)])
    yield from _drift(history, played)
    odd = [each.rank for each in played if each.digest != played[0].digest]
    if odd:
        yield Finding("V1", "digest of all views", "rank 0's", f"another on ranks {odd}", Where(rank=odd[0]))
    yield from _refusals(history, played[0])


def _drift(history: History, played: Sequence[Played]) -> Iterator[Finding]:
    """The first step after which ranks know different things, or which only some of them refused (L7)."""
    for what, values in (
        ("refusal of", [each.refusals for each in played]),
        ("tables after", [each.fingerprints for each in played]),
    ):
        for index, of_ranks in enumerate(zip(*values, strict=False)):  # a rank stops at too many findings
            if odd := _unlike_the_first(of_ranks):
                step = history.history[index]
                yield Finding(
                    "L7",
                    f"{what} {step.name}",
                    f"rank 0's{_text(of_ranks[0])}",
                    f"another on ranks {', '.join(map(str, odd))}{_text(of_ranks[odd[0]])}",
                    Where(step=index + 1, rank=odd[0]),
                )
                break


def _unlike_the_first(values: Sequence[T]) -> list[int]:
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _text(value: object) -> str:
    """Of a refusal; a fingerprint says nothing to anybody."""
    return "" if isinstance(value, int) else f": {value or 'none'}"


def _refusals(history: History, first: Played) -> Iterator[Finding]:
    """A step is refused if it says so, and only then."""
    for index, refusal in enumerate(first.refusals):
        step = history.history[index]
        if step.refused != (refusal is not None):
            expected = "a refusal" if step.refused else "none"
            yield Finding(REFUSAL, step.name, expected, refusal or "none", Where(step=index + 1))
