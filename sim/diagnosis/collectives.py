"""Which rank called something else than the others, and what that was."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from refmodel.collectives import Call
from sim.diagnosis.ledger import outvoted
from sim.diagnosis.sentence import SKIP_OR_SWAP, Diagnosis, name_of, ranks_text

Calls = Sequence[Call]


def diagnose_collectives(
    ledgers: Sequence[Calls], ended: Mapping[int, str], *, final: bool
) -> Diagnosis | None:
    """As :func:`sim.diagnosis.explain.diagnose`, of collectives."""
    for lists in _lists(ledgers):
        scene = _scene(lists, ended, final=final)
        if scene is not None:
            return scene.diagnosis()
    return None


def _lists(ledgers: Sequence[Calls]) -> Iterator[dict[int, list[Call]]]:
    """What V6 compares: the collectives of all ranks, then those of each smaller group, by rank."""
    by_group: dict[str, dict[int, list[Call]]] = {}
    everyone: dict[int, list[Call]] = {rank: [] for rank in range(len(ledgers))}
    for rank, calls in enumerate(ledgers):
        for call in calls:
            if call.is_message:
                continue
            whole = call.group_size == len(ledgers)
            lists = everyone if whole else by_group.setdefault(call.group, {})
            lists.setdefault(rank, []).append(call)
    yield everyone
    yield from by_group.values()


def _scene(lists: dict[int, list[Call]], ended: Mapping[int, str], *, final: bool) -> _Scene | None:
    """The first place where one rank differs from most others."""
    for place in range(max(map(len, lists.values()))):
        came = {rank: calls[place].key for rank, calls in lists.items() if len(calls) > place}
        gone = {rank: None for rank in lists if rank in ended and rank not in came}
        away = [rank for rank in lists if rank not in came and rank not in gone]
        votes: dict[int, Hashable] = {**came, **gone}
        if len(set(votes.values())) > 1:
            odd = outvoted(votes)
        elif final and len(away) == 1 and not gone:
            odd = tuple(away)
        else:
            continue
        if len(odd) != 1:
            return None
        others = [rank for rank in votes if rank != odd[0]]
        furthest = max(others, key=lambda rank: len(lists[rank]))
        return _Scene(
            odd[0],
            lists[odd[0]],
            lists[furthest],
            place,
            others,
            ended.get(odd[0], ""),
            all(rank in ended for rank in others),
        )
    return None


@dataclass(frozen=True, slots=True)
class _Scene:
    """A rank and its calls, beside those of the others, which agree up to ``place`` and a little beyond."""

    rank: int
    mine: Calls
    theirs: Calls
    place: int
    others: list[int]
    ended: str  # the rank makes no more calls, as it did this; empty if it may make more
    they_ended: bool

    def diagnosis(self) -> Diagnosis:
        mine, theirs = self.mine[self.place :], self.theirs[self.place :]
        if not mine:
            return self._absent(theirs[0])
        if not theirs:
            return self._beyond(mine[0])
        # The rest of both lists may say which of several explanations holds.
        came_late = len(mine) > 1 and mine[1].key == theirs[0].key
        came_early = len(theirs) > 1 and theirs[1].key == mine[0].key
        if mine[0].site == theirs[0].site and not came_early:
            return self._altered(mine[0], theirs[0])
        if self._repeats(mine[0]) and (came_late or len(mine) == 1):
            return self._twice(mine[0])
        if came_late and (came_early or len(theirs) == 1):
            return self._says(
                "swap", theirs[0], f"swapped {name_of(theirs[0])} and {name_of(mine[1], mine[0])}"
            )
        if came_late or (not came_early and (len(theirs) > 1 or self.they_ended)):
            return self._says("other", mine[0], f"issued {mine[0]} {self._where(theirs[0])}")
        if len(mine) > 1 or self.ended:
            return self._says("skip", theirs[0], f"skipped {name_of(theirs[0])}")
        either = f"skipped {name_of(theirs[0])}, or swapped it with {mine[0].site}"
        return self._says(SKIP_OR_SWAP, theirs[0], either)

    def _absent(self, call: Call) -> Diagnosis:
        last = f"after {name_of(self.mine[-1])} it" if self.mine else "it"
        if not self.ended:
            waiting = ranks_text(self.others)
            return self._says(
                "hang", call, f"hangs: {last} does not come to {name_of(call)}, where {waiting} wait"
            )
        # A rank that calls the same all over could also have left out one of those.
        earlier = ", or skipped an earlier one" if self.mine and self.mine[-1].key == call.key else ""
        return self._says("return", call, f"{self.ended} before {name_of(call)}{earlier}")

    def _beyond(self, call: Call) -> Diagnosis:
        if self._repeats(call):
            return self._twice(call)
        return self._says("other", call, f"issued {call} after {ranks_text(self.others)} returned")

    def _altered(self, mine: Call, theirs: Call) -> Diagnosis:
        """The same call, but not the same in this."""
        aspects = {
            "kind": (mine.kind, theirs.kind),
            "detail": (mine.detail, theirs.detail),
            "dtype": (mine.dtype, theirs.dtype),
            "shape": (list(mine.shape), list(theirs.shape)),
            "group": (mine.group, theirs.group),
        }
        aspect, (is_so, should) = next(
            ((name, pair) for name, pair in aspects.items() if pair[0] != pair[1]), ("other", ("", ""))
        )
        meanwhile = f"while {ranks_text(self.others)} sent {should}"
        return self._says(aspect, theirs, f"sent another {aspect} at {name_of(theirs)}: {is_so}, {meanwhile}")

    def _repeats(self, call: Call) -> bool:
        before = self.mine[self.place - 1] if self.place else None
        return before is not None and (before.key, before.site) == (call.key, call.site)

    def _twice(self, call: Call) -> Diagnosis:
        return self._says("twice", call, f"issued {name_of(self.mine[self.place - 1])} twice")

    def _where(self, call: Call) -> str:
        verb = "issues" if len(self.others) == 1 else "issue"
        return f"where {ranks_text(self.others)} {verb} {name_of(call)}"

    def _says(self, fault: str, call: Call, deed: str) -> Diagnosis:
        return Diagnosis(fault, self.rank, call.site, f"rank {self.rank} {deed}")
