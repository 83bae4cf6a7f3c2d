"""What each rank called, in order: compare, and explain the first divergence (law V6)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refmodel.errors import Where
from sim.diagnosis.sentence import ranks_text
from sim.failures import Diverged

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from refmodel.collectives import Call


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where the ranks of a group did not call the same.

    ``calls`` pairs each rank that came to this place with its call there; None means that the rank made
    no more calls. ``odd`` are the ranks outvoted by a majority; empty when there is none, and then
    nobody is blamed.

    >>> from refmodel.collectives import Call
    >>> view = Call(3, "view", "all_gather", (4, 2), "uint8", group="0", group_size=3, num_bytes=8)
    >>> print(Divergence(3, odd=(1,), calls=((0, view), (1, None), (2, view))))
    at call 3, rank 1 makes no more calls, while ranks 0, 2 issue view: all_gather [4, 2] uint8
    """

    sequence: int
    odd: tuple[int, ...]
    calls: tuple[tuple[int, Call | None], ...]

    @property
    def call(self) -> Call | None:
        """What the first odd rank did, or the first rank if nobody is blamed."""
        blamed = self.odd[0] if self.odd else self.calls[0][0]
        return dict(self.calls)[blamed]

    def __str__(self) -> str:
        did: dict[str, list[int]] = {}
        for rank, call in sorted(self.calls, key=lambda entry: entry[0] not in self.odd):
            did.setdefault(self._describe(call), []).append(rank)
        sides = [f"{ranks_text(ranks)} {_verb(ranks, what)}" for what, ranks in did.items()]
        return f"at call {self.sequence}, {', while '.join(sides)}"

    def _describe(self, call: Call | None) -> str:
        if call is None:
            return ""
        groups = {other.group for _, other in self.calls if other is not None}
        where = f" on group {call.group}" if len(groups) > 1 else ""
        return f"{call.site}: {call.what}{where}"


def diverged(world: str, divergence: Divergence, positions: Sequence[str] = ()) -> Diverged:
    """The exception that says so."""
    blamed = divergence.odd[0] if divergence.odd else None
    return Diverged(
        f"the ranks of {world} diverge",
        expected="the same ordered calls on every rank (V6)",
        received=str(divergence),
        where=Where(rank=blamed, site=None if divergence.call is None else divergence.call.site),
        fix="Issue every collective on all ranks in one order, also when a rank has no rows.",
        positions=positions,
    )


def first_divergence(
    ledgers: Sequence[Sequence[Call]], finished: Collection[int] | None = None
) -> Divergence | None:
    """The first place where the ledgers of all ranks, in rank order, differ; None if V6 holds.

    ``finished`` are the ranks that call no more; None means all.
    """
    comparison = Comparison(len(ledgers))
    for rank, ledger in enumerate(ledgers):
        for call in ledger:
            comparison.issued(rank, call)
    for rank in range(len(ledgers)) if finished is None else sorted(finished):
        comparison.finished(rank)
    return comparison.divergence()


class Comparison:
    """Compares the ledgers of ``size`` ranks while they grow, one step for each call.

    Calls of groups that hold all ranks are one ordered list, whichever group: swapping two of them hangs
    as surely as swapping within one. Calls of a smaller group are compared among its members, which are
    the ranks that call it; a member that never does is not seen here. Messages from rank to rank are not
    compared: they differ by their nature, and a world that matches them sees more.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lists: dict[str, dict[int, list[Call]]] = {_EVERYONE: {rank: [] for rank in range(size)}}
        self._longest: dict[str, list[Call]] = {_EVERYONE: []}
        self._finished: set[int] = set()
        self._place: tuple[str, int] | None = None

    def issued(self, rank: int, call: Call) -> None:
        """``rank`` issues ``call``, its next."""
        if call.is_message:
            return
        group = _EVERYONE if call.group_size == self._size else call.group
        mine = self._lists.setdefault(group, {}).setdefault(rank, [])
        longest = self._longest.setdefault(group, [])
        place = len(mine)
        mine.append(call)
        if place == len(longest):
            longest.append(call)
        if call.key != longest[place].key or self._somebody_ended(group, place):
            self._note(group, place)

    def finished(self, rank: int) -> None:
        """``rank`` makes no more calls."""
        self._finished.add(rank)
        for group, lists in self._lists.items():
            if rank in lists and len(lists[rank]) < len(self._longest[group]):
                self._note(group, len(lists[rank]))

    def decided(self) -> bool:
        """Whether the ranks differ and all have come to that place, so that a majority can be told."""
        if self._place is None:
            return False
        group, place = self._place
        return all(len(calls) > place or rank in self._finished for rank, calls in self._lists[group].items())

    def divergence(self) -> Divergence | None:
        """The first place where the ranks that came so far differ; None if there is none."""
        if self._place is None:
            return None
        group, place = self._place
        calls: dict[int, Call | None] = {}
        for rank, mine in sorted(self._lists[group].items()):
            if len(mine) > place:
                calls[rank] = mine[place]
            elif rank in self._finished:
                calls[rank] = None
        keys = {rank: None if call is None else call.key for rank, call in calls.items()}
        sequence = max(call.sequence for call in calls.values() if call is not None)
        return Divergence(sequence, outvoted(keys), tuple(calls.items()))

    def _somebody_ended(self, group: str, place: int) -> bool:
        lists = self._lists[group]
        return any(rank in lists and len(lists[rank]) <= place for rank in self._finished)

    def _note(self, group: str, place: int) -> None:
        if self._place is None or (self._place[0] == group and place < self._place[1]):
            self._place = (group, place)


# No group of torch has an empty name.
_EVERYONE = ""


def outvoted(votes: dict[int, Hashable]) -> tuple[int, ...]:
    """The ranks that differ from what more than half of the ranks chose; none without such a majority."""
    (choice, count), *_ = Counter(votes.values()).most_common()
    if 2 * count <= len(votes):
        return ()
    return tuple(rank for rank, vote in votes.items() if vote != choice)


def _verb(ranks: Sequence[int], what: str) -> str:
    one = len(ranks) == 1
    if not what:
        return "makes no more calls" if one else "make no more calls"
    return f"{'issues' if one else 'issue'} {what}"
