"""Laws T1, T2, T3: which pages a rank sends of a chunk, and where decode puts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.transfer_jobs import Job, jobs
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import logical_page
from refmodel.serving.receiver import Registration
from refmodel.serving.transfer import Message, Pair, Sender, chunk_pages, destination_pages, pairs


@proves("T1")
@given(jobs())
def test_a_chunk_sends_its_full_pages_and_the_last_its_tail_page(job: Job) -> None:
    P, sent = job.grid.page_size, 0
    for end in job.ends:
        is_last = end == job.tokens
        chunk = chunk_pages(sent, end, is_last, P)
        # Counted one by one: a page is full if its last slot is written, begun if its first is.
        ready = [page for page in range(end + 1) if page * P + (0 if is_last else P - 1) < end]
        assert list(chunk) == ready[sent:]
        sent = len(ready)


@proves("T2", "T3")
@given(jobs(), st.integers(0, 5))
def test_each_position_leaves_from_the_rank_that_stores_its_page(job: Job, first: int) -> None:
    W = job.grid.world_size
    sent = [(rank, *pair) for rank in range(W) for pair in pairs(job.pages, first, rank, W)]
    assert sorted(position for _, _, position in sent) == list(range(first, first + len(job.pages)))
    for rank, local, position in sent:
        assert logical_page(local, rank, W) == job.pages[position - first]


@proves("T2")
@given(jobs(), st.data())
def test_the_position_chooses_the_destination(job: Job, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.sampled_from(range(len(job.pages))), unique=True))
    destinations_ = destination_pages(job.decode_pages, [Pair(1, position) for position in positions])
    assert dict(zip(positions, destinations_, strict=True)) == {p: job.decode_pages[p] for p in positions}


def test_worked_numbers() -> None:
    assert [pairs(range(8, 16), 0, rank, 4) for rank in range(4)] == [
        ((2 + i, rank), (3 + i, rank + 4)) for rank in range(4) for i in [0]
    ]
    assert [[p.position for p in pairs([100, 7, 42, 9, 88], 0, rank, 2)] for rank in (0, 1)] == [
        [0, 2, 4],
        [1, 3],
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chunk_pages(2, 127, False, 64), "end of a chunk in tokens: expected an integer >= 128"),
        (lambda: pairs([4, 3], 5, 0, 4), r"dummies, got 3 \(rank 0, position 6\)"),
        (lambda: Sender(0, 2, Grid(2, 64)), "rank of a sender: expected 0 … 1, got 2"),
        (
            lambda: Sender(0, 0, Grid(2, 4)).send([2], 5, is_last=True, written=5),
            "at least 2 for 5 tokens, got 1",
        ),
        (lambda: Message(0, 0, 0, True, 0, 1, (Pair(0, 0),), ()), "local page 0 is the dummy page, got 0"),
        (lambda: Message(0, 0, 0, True, 0, 1, (Pair(1, 1),), ()), r"rising, in range\(0, 1\), got \[1\]"),
        (
            lambda: Message(0, 0, 0, True, 0, 2, (Pair(1, 1), Pair(1, 0)), ()),
            r"rising, in range\(0, 2\), got \[1, 0\]",
        ),
        (lambda: Message(0, 0, 0, True, 2, 1, (), ()), "stop page of a message: expected an integer >= 2"),
        (lambda: Registration(0, 65, (1,), 64), r"2 different ones for 65 tokens, got \[1\]"),
        (lambda: Registration(0, 65, (1, 1), 64), r"2 different ones for 65 tokens, got \[1, 1\]"),
        (lambda: Registration(0, 0, (), 64), "tokens of a registration: expected an integer >= 1"),
    ],
)
def test_what_has_no_meaning_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        call()
