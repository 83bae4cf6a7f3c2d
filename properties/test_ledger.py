"""Comparing what all ranks called (V6)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel.collectives import Call
from sim.diagnosis.ledger import first_divergence


def ledger_of(*sites: str, rank_count: int = 3, group: str = "0") -> list[Call]:
    return [
        Call(n, site, "all_gather", (2,), "float32", group, rank_count, 8) for n, site in enumerate(sites)
    ]


@proves("V6")
@given(
    sites=st.lists(st.sampled_from("abc"), max_size=6),
    size=st.integers(3, 6),
    data=st.data(),
)
@settings(deadline=None)
def test_the_first_divergence_names_the_odd_rank(sites: list[str], size: int, data: st.DataObject) -> None:
    ledgers = [ledger_of(*sites, rank_count=size) for _ in range(size)]
    assert first_divergence(ledgers) is None
    odd = data.draw(st.integers(0, size - 1))
    place = data.draw(st.integers(0, len(sites)))
    ledgers[odd] = ledger_of(*sites[:place], "x", *sites[place + 1 :], rank_count=size)
    found = first_divergence(ledgers)
    assert found is not None
    assert (found.sequence, found.odd) == (place, (odd,))
    assert found.call is not None
    assert found.call.site == "x"
    assert f"rank {odd} issues x" in str(found)


@proves("V6")
def test_a_ledger_that_ends_early_is_named() -> None:
    found = first_divergence([ledger_of("a", "b"), ledger_of("a"), ledger_of("a", "b")])
    assert found is not None
    assert (found.odd, found.call) == ((1,), None)
    assert str(found) == (
        "at call 1, rank 1 makes no more calls, while ranks 0, 2 issue b: all_gather [2] float32"
    )


def test_without_a_majority_nobody_is_blamed() -> None:
    found = first_divergence([ledger_of("a"), ledger_of("b"), ledger_of("c")])
    assert found is not None
    assert found.odd == ()
    assert str(found).count(", while ") == 2


def test_calls_of_subgroups_are_compared_among_their_members() -> None:
    pair, others = ledger_of("p", rank_count=2, group="1"), ledger_of("q", rank_count=2, group="2")
    everyone = ledger_of("a", rank_count=4)
    assert first_divergence([pair + everyone, everyone + pair, others + everyone, others + everyone]) is None
    wrong = ledger_of("r", rank_count=2, group="1")
    found = first_divergence([pair + everyone, wrong + everyone, everyone, everyone])
    assert found is not None
    assert [rank for rank, _ in found.calls] == [0, 1]


def test_a_key_holds_what_all_ranks_must_agree_on() -> None:
    call = ledger_of("a")[0]
    assert call._replace(sequence=7, num_bytes=0).key == call.key
    for change in (
        {"kind": "all_reduce"},
        {"detail": "SUM"},
        {"shape": (3,)},
        {"dtype": "int8"},
        {"group": "1"},
    ):
        assert call._replace(**change).key != call.key
    # Rows of an all_to_all are each rank's own; and one line may scatter where another receives.
    assert call._replace(is_even=False).key == call._replace(is_even=False, shape=(3,)).key
    assert (
        call._replace(is_named=False, site="x.py:1").key == call._replace(is_named=False, site="x.py:9").key
    )


def test_messages_from_rank_to_rank_are_not_compared() -> None:
    both = ledger_of("a", "b", rank_count=2)
    message = both[0]._replace(kind="send", is_message=True)
    assert first_divergence([[message, *both], both]) is None
