"""V6: from the calls of all ranks alone, what one of them did is told apart and named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel.collectives import Call
from sim.diagnosis.explain import diagnose

SIZE = 3


def calls_of(*sites: str, **other: str | tuple[int, ...]) -> list[Call]:
    """One all_gather for each site; ``other`` is what the last one has."""
    calls = [Call(n, site, "all_gather", (4, 2), "uint8", "0", SIZE, 8) for n, site in enumerate(sites)]
    if other:
        calls[-1] = calls[-1]._replace(**other)  # type: ignore[arg-type]
    return calls


RIGHT = calls_of("a", "b", "c", "d")
RETURNED = {1: "returned"}

# What rank 1 of 3 called, how it ended, how far the others came, and what is said.
TOLD_APART = {
    "skip": (calls_of("a", "c", "d"), RETURNED, 4, "rank 1 skipped #1 b"),
    "skip, seen at once": (calls_of("a", "c"), {}, 2, "rank 1 skipped #1 b, or swapped it with c"),
    "twice": (calls_of("a", "b", "b", "c", "d"), RETURNED, 4, "rank 1 issued #1 b twice"),
    "twice, seen at once": (calls_of("a", "b", "b"), {}, 3, "rank 1 issued #1 b twice"),
    "twice, the last": (calls_of("a", "b", "c", "d", "d"), {}, 4, "rank 1 issued #3 d twice"),
    "swap": (calls_of("a", "c", "b", "d"), RETURNED, 4, "rank 1 swapped #1 b and #2 c"),
    "swap, the others wait": (calls_of("a", "c", "b"), {}, 2, "rank 1 swapped #1 b and #2 c"),
    "return": (calls_of("a", "b"), RETURNED, 3, "rank 1 returned before #2 c"),
    "death": (calls_of("a", "b"), {1: "died"}, 3, "rank 1 died before #2 c"),
    "another call": (
        calls_of("a", "x", "c"),
        {},
        3,
        "rank 1 issued #1 x: all_gather [4, 2] uint8 on group 0 where ranks 0, 2 issue #1 b",
    ),
    "kind": (
        calls_of("a", "b", kind="broadcast"),
        {},
        2,
        "rank 1 sent another kind at #1 b: broadcast, while ranks 0, 2 sent all_gather",
    ),
    "shape": (
        calls_of("a", "b", shape=(5, 2)),
        {},
        2,
        "rank 1 sent another shape at #1 b: [5, 2], while ranks 0, 2 sent [4, 2]",
    ),
    "dtype": (
        calls_of("a", "b", dtype="int8"),
        {},
        2,
        "rank 1 sent another dtype at #1 b: int8, while ranks 0, 2 sent uint8",
    ),
}


@proves("V6")
@pytest.mark.parametrize("what", TOLD_APART)
def test_what_a_rank_did_is_told_apart(what: str) -> None:
    mine, ended, came, sentence = TOLD_APART[what]
    others = {rank: "returned" for rank in (0, 2) if came == len(RIGHT)}
    found = diagnose([RIGHT[:came], mine, RIGHT[:came]], {**ended, **others})
    assert found is not None
    assert (found.rank, str(found)) == (1, sentence)


def test_a_rank_that_does_not_come_hangs_once_nobody_moves() -> None:
    ledgers = [RIGHT[:3], RIGHT[:2], RIGHT[:3]]
    assert diagnose(ledgers, {}) is None
    found = diagnose(ledgers, {}, final=True)
    assert str(found) == "rank 1 hangs: after #1 b it does not come to #2 c, where ranks 0, 2 wait"


def test_a_rank_that_never_calls_hangs_too() -> None:
    found = diagnose([RIGHT[:1], [], RIGHT[:1]], {}, final=True)
    assert str(found) == "rank 1 hangs: it does not come to #0 a, where ranks 0, 2 wait"


def test_one_call_fewer_among_equal_ones_may_be_any_of_them() -> None:
    full = calls_of("a", "a", "a")
    found = diagnose([full, full[:2], full], dict.fromkeys(range(SIZE), "returned"))
    assert str(found) == "rank 1 returned before #2 a, or skipped an earlier one"


def test_without_a_majority_nobody_is_blamed() -> None:
    assert diagnose([calls_of("a"), calls_of("b"), calls_of("c")], {}) is None
    pair = [[call._replace(group_size=2) for call in calls_of(site)] for site in "ab"]
    assert diagnose(pair, {}) is None


def test_what_follows_the_program_by_line_is_named_by_its_line() -> None:
    right = [call._replace(is_named=False) for call in calls_of("x.py:1", "x.py:2")]
    wrong = [right[0], right[1]._replace(site="x.py:1", sequence=1)]
    # By line alone the calls are the same for V6: a root may well stand in another line.
    assert diagnose([right, wrong, right], {}) is None
    wrong[1] = wrong[1]._replace(kind="broadcast")
    found = diagnose([right, wrong, right], dict.fromkeys(range(SIZE), "returned"))
    assert "issued #1 x.py:1: broadcast" in str(found)


@proves("V6")
@given(
    sites=st.lists(st.sampled_from("abcd"), min_size=1, max_size=8),
    size=st.integers(3, 6),
    odd=st.integers(0, 5),
    place=st.integers(0, 7),
    edit=st.sampled_from(["skip", "twice", "swap", "none"]),
)
def test_whatever_one_rank_does_it_alone_is_blamed(
    sites: list[str], size: int, odd: int, place: int, edit: str
) -> None:
    odd, place = odd % size, place % len(sites)
    mine = list(sites)
    if edit == "skip":
        del mine[place]
    elif edit == "twice":
        mine.insert(place, mine[place])
    elif edit == "swap":
        mine[place : place + 2] = mine[place : place + 2][::-1]
    ledgers = [[call._replace(group_size=size) for call in calls_of(*sites)] for _ in range(size)]
    ledgers[odd] = [call._replace(group_size=size) for call in calls_of(*mine)]
    found = diagnose(ledgers, dict.fromkeys(range(size), "returned"))
    assert (found is None) == (mine == sites)
    if found is not None:
        assert found.rank == odd
        assert str(found).startswith(f"rank {odd} ")


# Messages: two rounds of a ring of three, in each a send to the next rank and a receive from the one before.


def ring_of(rank: int, rounds: int = 2) -> list[Call]:
    calls = []
    for turn in range(rounds):
        for kind, detail in (("send", f"to {(rank + 1) % SIZE}"), ("recv", f"from {(rank - 1) % SIZE}")):
            sequence = 2 * turn + (kind == "recv")
            calls.append(Call(sequence, "ring", kind, (4,), "uint8", "0", SIZE, 4, detail, is_message=True))
    return calls


def numbered(calls: list[Call]) -> list[Call]:
    return [call._replace(sequence=n) for n, call in enumerate(calls)]


ALL_RETURNED = dict.fromkeys(range(SIZE), "returned")


def test_messages_that_match_say_nothing() -> None:
    assert diagnose([ring_of(rank) for rank in range(SIZE)], ALL_RETURNED) is None


def test_a_message_sent_twice_is_named() -> None:
    one = ring_of(1)
    wrong = numbered([one[0], *one])
    found = diagnose([ring_of(0), wrong, ring_of(2)], ALL_RETURNED)
    assert str(found) == "rank 1 sent #0 ring to rank 2 twice: 3 messages for 2 receives"


def test_a_message_that_nobody_receives_is_named() -> None:
    found = diagnose([ring_of(0), ring_of(1), ring_of(2)[:3]], ALL_RETURNED)
    assert str(found) == "rank 1 sent #2 ring to rank 2, which does not receive it"


def test_a_message_that_is_not_sent_is_named_by_who_should_have() -> None:
    # Rank 1 leaves out its first send and goes on to wait for rank 0, which waits for rank 2.
    ledgers = [ring_of(0), numbered(ring_of(1)[1:2] + ring_of(1)[3:]), ring_of(2)[:2]]
    found = diagnose(ledgers, {1: "returned"}, final=True)
    assert str(found) == "rank 1 did not send what rank 2 waits for in #1 ring"


def test_a_message_that_was_sent_and_is_waited_for_is_lost() -> None:
    ledgers = [ring_of(0), ring_of(1), ring_of(2)[:2]]
    assert diagnose(ledgers, {1: "returned"}) is None
    lost = "rank 1 sent #0 ring to rank 2, which still waits for it in #1 ring: it is lost"
    assert str(diagnose(ledgers, {1: "returned"}, final=True, waiting=[0, 2])) == lost
    assert str(diagnose(ledgers, {1: "returned"}, final=True)) == f"{lost}, or rank 2 hangs after it"
    hangs = diagnose(ledgers, {1: "returned"}, final=True, waiting=[0])
    assert str(hangs) == "rank 2 hangs after #1 ring"


def test_receives_from_any_rank_are_not_judged() -> None:
    receives = ring_of(2)[1:2]
    assert "rank 1 sent" in str(diagnose([[], ring_of(1), receives], ALL_RETURNED))
    from_any = [receives[0]._replace(detail="from any")]
    assert "sent #0 ring to rank 2" not in str(diagnose([[], ring_of(1), from_any], ALL_RETURNED))
