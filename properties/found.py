"""What a hunt found: a history that does not hold, made as small as it goes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from properties.drawing.service import LAWS
from properties.drills import Drill, alike
from properties.machine import Broken
from properties.rehearsal import Rehearsal
from properties.rehearsal.ranks import drifted
from properties.shrinking import MOST_TRIES, renamed, shrunk
from refmodel.errors import Finding
from refmodel.laws import LAWS as CONTRACT
from sim.gate.setting import Setting
from sim.gate.verdict import Verdict
from sim.histories.history import History
from sim.histories.writing import history_file
from sim.kernels.loading import Named

TRIES = 8  # looks at a history that does not fail every time
MOST_PLAYED = 300  # histories that ranks play to make one smaller which only they can judge
MOST_DRILLED = 100  # of which each is played with a dozen drills

Key = tuple[str, str]  # law, and what broke without its numbers
Play = Callable[[History], tuple[Finding, ...]]  # what ranks find in a history


@dataclass(frozen=True, slots=True)
class Found:
    """One way in which histories fail, at its smallest."""

    history: History
    finding: Finding
    seed: int  # of the schedule
    world: str  # kind
    by_ranks: bool  # the gate shows it too; else only the rehearsal does
    kernels: Named | None = None  # that stood in the place of the reference
    drill: str = ""  # what was done to a history that holds by itself, and went unnoticed

    @property
    def key(self) -> Key:
        return key_of(self.finding)

    @property
    def file_name(self) -> str:
        """``l3-free-pages.yaml``"""
        return re.sub(r"[^a-z0-9]+", "-", " ".join(self.key).lower()).strip("-")[:60] + ".yaml"

    def replay(self, folder: Path) -> str:
        """The line that shows it again."""
        file = folder / self.file_name
        options = Setting(seed=self.seed, kernels=self.kernels).options
        if self.drill:
            return f'cpkv fuzz --replay {file} --world {self.world} {options} --drill "{self.drill}"'
        if not self.by_ranks:
            return f"cpkv fuzz --replay {file}"
        return f"cpkv gate {file} --world {self.world}:{self.history.world_size} {options}"


def write_found(found: Found, folder: Path) -> Path:
    """The history as a file there; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / found.file_name
    file.write_text(history_file(found.history), encoding="utf-8")
    return file


def key_of(finding: Finding) -> Key:
    """Findings alike but for numbers and ranks are one."""
    what = re.sub(r", on ranks .*", "", finding.what)
    return finding.law, re.sub(r"\d+", "n", what)


def rehearsed(history: History) -> Rehearsal:
    """A history rehearsed up to the first step that does not hold."""
    rehearsal = Rehearsal(replace(history, history=[]))
    for step in history.history:
        rehearsal.step(step)
        if rehearsal.findings:
            break
    return rehearsal


def smallest(
    broken: Broken, world: str, play: Play, known: Collection[Key], kernels: Named | None = None
) -> Found:
    """The smallest history that fails in a way not known yet, as the cheapest judge that sees it sees it."""
    if broken.history.refused_at_start is not None:  # no step of it is played
        finding = broken.findings[0]
        return Found(_titled(broken.history, finding), finding, broken.seed, world, True, kernels)
    judges: list[tuple[Play, int]] = [
        (lambda history: tuple(rehearsed(history).findings), MOST_TRIES),
        (lambda history: drifted(_foreseen(history)), MOST_TRIES),
        (lambda history: play(_foreseen(history)), MOST_PLAYED),
    ]

    def found_by(look: Play, history: History, tries: int) -> tuple[Finding, ...]:
        """What one of several looks finds that is not known."""
        looks = (look(history) for _ in range(tries))
        return next((found for found in looks if found and key_of(found[0]) not in known), ())

    look, most_tries = next(
        (each for each in judges[:2] if found_by(each[0], broken.history, TRIES)), judges[2]
    )
    is_steady = all(found_by(look, broken.history, 1) for _ in range(3))
    tries = 1 if is_steady else TRIES
    small = shrunk(broken.history, lambda tried: bool(found_by(look, tried, tries)), most_tries=most_tries)
    rehearsal = rehearsed(renamed(small))
    by_ranks = found_by(play, rehearsal.history, TRIES)
    finding = [*by_ranks, *rehearsal.findings, *broken.findings][0]
    history = _titled(rehearsal.history, finding)
    return Found(history, finding, broken.seed, world, bool(by_ranks), kernels)


def _foreseen(history: History) -> History:
    """A history with what the model says of each step."""
    return rehearsed(history).history


def _titled(history: History, finding: Finding) -> History:
    return replace(
        history,
        title=f"{finding.law} broke: {finding.what}",
        why=f"Expected {finding.expected}; got {finding.received.partition(chr(10))[0]}.",
        laws=[finding.law] if finding.law in CONTRACT else list(LAWS),
    )


def undrilled(
    drawn: Broken,
    drill: Drill,
    world: str,
    play: Callable[[History], Verdict[Any]],
    look: Callable[[History, Drill], tuple[Finding, ...]],
    kernels: Named | None = None,
) -> Found:
    """The smallest history found in which such a drill is not noticed, though it holds without."""
    key = key_of(drawn.findings[0])

    def missed(history: History) -> tuple[Drill, Finding] | None:
        """A drill of this kind that is not noticed in a history, and what is said of it."""
        rehearsal, verdict = rehearsed(history), play(history)
        if rehearsal.findings or verdict.findings:
            return None
        for each in alike(drill, rehearsal, verdict.calls):
            for finding in look(history, each):
                if key_of(finding) == key:
                    return each, finding
        return None

    small = shrunk(drawn.history, lambda tried: missed(_foreseen(tried)) is not None, most_tries=MOST_DRILLED)
    history = _foreseen(renamed(small))
    # It may not come every time.
    again = missed(history)
    if again is None:
        history, again = drawn.history, (drill, drawn.findings[0])
    drill, finding = again
    titled = _titled(history, finding)
    return Found(titled, finding, drawn.seed, world, by_ranks=True, kernels=kernels, drill=str(drill))
