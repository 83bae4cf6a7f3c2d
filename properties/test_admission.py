"""Laws G1–G4: how many requests go into a batch, and where chunks end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import PAGE_SIZES, near
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.plan import plan_batch
from refmodel.layout.split import Split
from refmodel.serving.admission import Caps, admit, chunk_end

page_sizes = st.sampled_from(PAGE_SIZES)


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that wait, by their new tokens, and what holds for their batch."""

    waiting: tuple[int, ...]
    caps: Caps
    page_size: int


@st.composite
def queues(draw: st.DrawFn) -> Queue:
    """Caps lie around the sums at which one more request just fits, aligned to pages or not."""
    page_size = draw(page_sizes)
    tokens = near([1, page_size, 10 * page_size], at_least=1) | st.integers(1, 30 * page_size)
    waiting = draw(st.lists(tokens, max_size=6))
    aligned = (-(-tokens // page_size) * page_size for tokens in waiting)
    sums = [*accumulate(waiting), *accumulate(aligned), 1]
    max_tokens = draw(st.none() | near(sums, at_least=1))
    return Queue(tuple(waiting), Caps(draw(st.none() | st.integers(1, 5)), max_tokens), page_size)


@proves("G1")
@given(queues(), st.booleans(), st.booleans())
def test_a_batch_has_one_request_unless_the_flag_widens_a_shared_kv_batch(
    queue: Queue, flag: bool, shared_kv: bool
) -> None:
    waiting, P = queue.waiting, queue.page_size
    if not (flag and shared_kv):
        assert admit(waiting, queue.caps, P, batch_flag=flag, shared_kv=shared_kv) == min(len(waiting), 1)
    assert admit(waiting, Caps(), P, batch_flag=True, shared_kv=True) == len(waiting)


def admitted(waiting: Sequence[int], caps: Caps, page_size: int) -> int:
    """With the flag on."""
    return admit(waiting, caps, page_size, batch_flag=True, shared_kv=True)


@proves("G2")
@given(queues())
def test_caps_hold_for_all_but_a_lone_request_and_no_room_is_left(queue: Queue) -> None:
    waiting, P = queue.waiting, queue.page_size
    count = admitted(waiting, queue.caps, P)
    most, room = (10**9 if cap is None else cap for cap in (queue.caps.max_requests, queue.caps.max_tokens))

    def fits(requests: int) -> bool:
        pages = sum(len(Extent(0, tokens).page_positions(P)) for tokens in waiting[:requests])
        return requests <= most and pages * P <= room

    assert count == min(len(waiting), 1) or fits(count)
    assert count == len(waiting) or (count >= 1 and not fits(count + 1))


@proves("G3")
@given(queues(), st.integers(1, 2**30))
def test_only_the_ratio_of_tokens_to_caps_counts(queue: Queue, times: int) -> None:
    """Were bytes or free pages estimated, a batch of the same shape but any times as large would be cut."""
    caps = queue.caps
    larger = Caps(caps.max_requests, caps.max_tokens and caps.max_tokens * times)
    scaled = admitted([tokens * times for tokens in queue.waiting], larger, queue.page_size * times)
    assert scaled == admitted(queue.waiting, caps, queue.page_size)


@proves("G4")
@given(st.integers(0, 200), st.integers(1, 600), page_sizes, st.integers(0, 200))
def test_chunks_end_at_page_multiples_until_the_last_and_are_as_long_as_can_be(
    prefix: int, tokens: int, page_size: int, more: int
) -> None:
    size, stop = page_size + more, prefix + tokens
    while prefix < stop:
        end = chunk_end(prefix, stop - prefix, size, page_size)
        possible = [
            e for e in range(prefix + 1, min(stop, prefix + size) + 1) if e == stop or e % page_size == 0
        ]
        assert end == possible[-1]
        prefix = end


@proves("G4")
@given(st.integers(1, 8), st.integers(1, 40), st.sampled_from([1, 4, 128]))
def test_a_chunk_of_any_number_of_pages_can_be_split(world_size: int, pages: int, page_size: int) -> None:
    end = chunk_end(0, pages * page_size + 1, pages * page_size, page_size)
    plan = plan_batch([Extent(0, end)], Grid(world_size, page_size), Split.PAGE_ALIGNED)
    assert sum(plan.row_counts) == pages * page_size


def test_worked_numbers() -> None:
    caps = Caps(max_requests=4, max_tokens=4096)
    assert admitted([1000, 2000, 900], caps, 64) == 3
    assert admitted([1000, 2000, 900, 64], caps, 64) == 4
    assert admitted([1000, 2000, 900, 65], caps, 64) == 3
    assert admitted([9000], caps, 64) == 1
    assert admitted([1, 1, 1, 1, 1], caps, 64) == 4
    # 3072 tokens grown by a quarter are 30 pages of 128, which 8 does not divide: no need to.
    assert chunk_end(0, 10_000, 3072 * 5 // 4, 128) == 3840


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Caps(max_requests=0), "cap max_requests: expected an integer >= 1, got 0"),
        (lambda: Caps(max_tokens=-1), "cap max_tokens: expected an integer >= 1, got -1"),
        (lambda: admitted([5, 0], Caps(), 64), "new tokens of a request: expected an integer >= 1, got 0"),
        (lambda: chunk_end(0, 5, 63, 64), "chunk size: expected at least a page, 64, got 63"),
        (lambda: chunk_end(-1, 5, 64, 64), "prefix of a chunk: expected an integer >= 0, got -1"),
        (lambda: chunk_end(0, 0, 64, 64), "remaining tokens of a request: expected an integer >= 1, got 0"),
    ],
)
def test_what_has_no_meaning_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        call()
