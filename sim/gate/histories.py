"""One history on one world, judged: what each rank found, and whether all of them did the same (law L7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from refmodel.errors import Finding, Where
from sim.engine.play import Played, play
from sim.engine.stale import Stale, play_stale
from sim.engine.start import Started, start
from sim.gate.setting import PLAIN, Setting
from sim.gate.verdict import Verdict, folded, try_program
from sim.histories.history import History
from sim.world import World

T = TypeVar("T")

REFUSAL = "refusal"  # stands where a law would: which one a refusal is about, only its text says


def try_history(
    world: World, history: History, setting: Setting = PLAIN
) -> Verdict[Played] | Verdict[Started]:
    """Play a history and judge it. A run that fails is a finding; a world that is missing is an error.

    A history that is to be refused at the start plays no step.
    """
    if history.refused_at_start is not None:
        return try_program(world, start, history, lambda run: judge_start(history, run.results), setting)
    return try_program(world, play, history, lambda run: judge_history(history, run.results), setting)


def try_stale(world: World, history: History, stale: Stale) -> Verdict[Played]:
    """Play a history in which one rank's tables are old, and judge it: it must not hold (L7)."""
    drill = (history, stale)
    return try_program(world, play_stale, drill, lambda run: judge_history(history, run.results))


def judge_start(history: History, started: Sequence[Started]) -> Iterator[Finding]:
    """Every rank's server must refuse the setting that the history names, for one reason (X1)."""
    expected = f"a refusal of {history.refused_at_start}"
    for rank, refusal in enumerate(each.refusal for each in started):
        if refusal is None or refusal.setting != history.refused_at_start:
            received = refusal.text if refusal else "none: it starts"
            yield Finding("X1", "start of the server", expected, received, Where(rank=rank))
            return
    odd = _unlike_the_first(started)
    if odd:
        yield Finding(
            "X1", "start of the server", "rank 0's refusal", f"another on ranks {odd}", Where(rank=odd[0])
        )


def judge_history(history: History, played: Sequence[Played]) -> Iterator[Finding]:
    """What ranks found, then where they did not do alike, then what was refused and should not, or not."""
    yield from folded(finding for each in played for finding in each.findings)
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
        for index, of_ranks in enumerate(zip(*values, strict=True)):
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
