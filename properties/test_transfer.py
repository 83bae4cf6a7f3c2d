"""Laws T1–T5, X1: what leaves the ranks of a prefill group, and what decode accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import FORMATS, grids, near
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.ownership import PageTable, logical_page, to_physical
from refmodel.serving.receiver import Missing, Receiver, Registration
from refmodel.serving.transfer import (
    Message,
    Pair,
    Phase,
    Sender,
    chunk_pages,
    destination_pages,
    pairs,
    put_pages,
    take_pages,
)
from refmodel.storage.baseline import empty_replica
from refmodel.storage.formats import Format
from refmodel.storage.identity import Cache, pack
from refmodel.storage.shard import Shard, destinations, empty_shard


@dataclass(frozen=True, slots=True)
class Job:
    """One request to transfer: its pages on both sides, and the ends of its chunks in tokens."""

    grid: Grid
    pages: tuple[int, ...]  # logical pages by position
    decode_pages: tuple[int, ...]
    ends: tuple[int, ...]  # rising; the last is the request's

    @property
    def tokens(self) -> int:
        return self.ends[-1]

    def receiver(self) -> Receiver:
        P = self.grid.page_size
        return Receiver(Registration(7, self.tokens, self.decode_pages, P), self.grid)

    def senders(self) -> list[Sender]:
        return [Sender(7, rank, self.grid) for rank in range(self.grid.world_size)]

    def messages(self) -> list[Message]:
        """Those of all ranks, chunk by chunk."""
        senders = self.senders()
        return [
            sender.send(self.pages, end, is_last=end == self.tokens, written=end)
            for end in self.ends
            for sender in senders
        ]


@st.composite
def jobs(draw: st.DrawFn, *, max_pages: int = 9) -> Job:
    """Scattered pages on both sides; chunk ends around page multiples, often several inside one page."""
    grid = draw(grids(max_page=4))
    W, P = grid.world_size, grid.page_size
    tokens = draw(near([1, P, 2 * P, W * P], at_least=1) | st.integers(1, max_pages * P))
    cuts = draw(st.sets(st.integers(1, tokens), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    count = num_pages(tokens, P)
    lanes = torch.randint(W, (count,), generator=generator)
    local = 1 + torch.randperm(2 * count, generator=generator)[:count]
    decode = 1 + torch.randperm(2 * count, generator=generator)[:count]
    pages = logical_page(local, lanes, W)
    return Job(grid, tuple(pages.tolist()), tuple(decode.tolist()), (*sorted(cuts - {tokens}), tokens))


def refusal(call: Callable[..., object], *args: Any, **options: Any) -> InvalidInput | None:
    """The error that a call is refused with, or None."""
    try:
        call(*args, **options)
    except InvalidInput as error:
        return error
    return None


# -- pure parts ----------------------------------------------------------------------------------------------


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


# -- senders -------------------------------------------------------------------------------------------------


@proves("T1", "T2", "T3", "T4")
@given(jobs())
def test_every_rank_sends_a_message_a_chunk_and_signals_in_the_last(job: Job) -> None:
    W = job.grid.world_size
    messages = job.messages()
    assert [(m.chunk, m.rank) for m in messages] == [(c, r) for c in range(len(job.ends)) for r in range(W)]
    assert [m.is_last for m in messages] == [end == job.tokens for end in job.ends for _ in range(W)]
    assert all(message.index_pairs == message.pairs for message in messages)
    arrived = sorted(pair.position for message in messages for pair in message.pairs)
    assert arrived == list(range(num_pages(job.tokens, job.grid.page_size)))


@proves("T3")
@given(jobs(), st.booleans())
def test_a_request_is_over_once(job: Job, aborted: bool) -> None:
    full = len(job.pages) * job.grid.page_size  # as much as could be sent if it were open
    for sender in job.senders():
        if aborted:
            sender.abort()
        else:
            sender.send(job.pages, job.tokens, is_last=True, written=job.tokens)
        over = sender.fingerprint()
        for is_last in (False, True):
            again = refusal(sender.send, job.pages, full, is_last=is_last, written=full)
            assert again is not None
        assert refusal(sender.abort) is not None
        assert sender.fingerprint() == over
        assert sender.phase is (Phase.ABORTED if aborted else Phase.FINISHED)
        assert not sender.check()


@proves("T5")
@given(jobs(), st.data())
def test_nothing_leaves_before_its_forward_is_finished(job: Job, data: st.DataObject) -> None:
    for sender in job.senders():
        for end in job.ends:
            before, early = sender.fingerprint(), data.draw(st.integers(0, end - 1))
            is_last = end == job.tokens
            error = refusal(sender.send, job.pages, end, is_last=is_last, written=early)
            assert error is not None
            assert sender.fingerprint() == before
            sender.send(job.pages, end, is_last=is_last, written=end)
            assert not sender.check()


# -- receivers -----------------------------------------------------------------------------------------------


def expected_missing(job: Job, came: Sequence[Message]) -> set[tuple[int, int]]:
    """(rank, chunk) that decode can know to be missing: of all chunks, once it knows which is the last."""
    keys = {(m.rank, m.chunk) for m in came}
    known = any(m.is_last for m in came)
    chunks = range(len(job.ends)) if known else range(max((c for _, c in keys), default=-1) + 2)
    return {(rank, chunk) for rank in range(job.grid.world_size) for chunk in chunks} - keys


@proves("T3")
@given(jobs(), st.data())
def test_messages_in_any_order_and_twice_arrive_once_and_what_is_missing_is_named(
    job: Job, data: st.DataObject
) -> None:
    receiver, messages = job.receiver(), job.messages()
    arrivals = data.draw(st.permutations(messages))
    came: list[Message] = []
    placed: dict[int, int] = {}
    repeats = 0
    for message in arrivals:
        assert not receiver.done()
        places = receiver.accept(message)
        placed |= {pair.position: page for pair, page in zip(message.pairs, places, strict=True)}
        came.append(message)
        assert not receiver.check()
        missing = {(m.rank, m.chunk): set(m.positions) for m in receiver.missing()}
        assert set(missing) == expected_missing(job, came)
        for other in messages:
            assert missing.get((other.rank, other.chunk), set()) >= (
                {pair.position for pair in other.pairs} if (other.rank, other.chunk) in missing else set()
            )
        for again in came if len(came) < len(messages) else ():
            assert receiver.accept(again) == ()
            repeats += 1
        assert receiver.repeats == repeats
    assert receiver.done()
    assert receiver.missing() == ()
    assert placed == dict(enumerate(job.decode_pages))


@proves("T3")
@given(jobs(), st.data())
def test_after_success_or_an_abort_everything_is_refused(job: Job, data: st.DataObject) -> None:
    receiver, messages = job.receiver(), job.messages()
    aborted = data.draw(st.booleans())
    for message in messages[: data.draw(st.integers(0, len(messages) - 1))] if aborted else messages:
        receiver.accept(message)
    if aborted:
        receiver.abort()
    over = receiver.fingerprint()
    assert all(refusal(receiver.accept, message) for message in messages)
    assert refusal(receiver.abort) is not None
    assert receiver.fingerprint() == over


@proves("T3")
@given(jobs())
def test_one_rank_without_its_final_signal_keeps_decode_waiting(job: Job) -> None:
    for silent in range(job.grid.world_size):
        receiver = job.receiver()
        for message in job.messages():
            if message.rank != silent or not message.is_last:
                receiver.accept(message)
        assert not receiver.done()
        assert [(m.rank, m.chunk) for m in receiver.missing()] == [(silent, len(job.ends) - 1)]


@st.composite
def wrong_counts(draw: st.DrawFn, message: Message) -> Message:
    """A message with another number of index pages, or of pages in all, than decode has registered."""
    extra = Pair(1, message.stop_page)
    fewer = message.index_pairs[:-1]
    choices = [replace(message, index_pairs=(*message.index_pairs, extra))]
    if message.pairs:
        choices.append(replace(message, index_pairs=fewer))
    if message.is_last:
        choices.append(replace(message, stop_page=message.stop_page + 1))
        longer = (*message.pairs, extra)
        choices.append(replace(message, stop_page=message.stop_page + 1, pairs=longer, index_pairs=longer))
    return draw(st.sampled_from(choices))


@st.composite
def contradictions(draw: st.DrawFn, job: Job, message: Message) -> Message:
    """A message that cannot be true beside the others of its request, all of which have come."""
    others = sorted(set(message.positions) - {pair.position for pair in message.pairs})
    choices = [
        replace(message, request=8),
        replace(message, rank=job.grid.world_size),
        replace(message, first_page=message.first_page + 1, stop_page=message.stop_page + 1, pairs=()),
    ]
    if (
        job.grid.world_size > 1 or not message.is_last
    ):  # then decode knows from another which chunk is the last
        choices.append(replace(message, is_last=not message.is_last))
        choices.append(replace(message, chunk=len(job.ends)))
    for pair in message.pairs:
        choices.append(replace(message, pairs=tuple(p for p in message.pairs if p != pair)))
    for position in others:
        more = sorted((*message.pairs, Pair(1, position)), key=lambda p: p.position)
        choices.append(replace(message, pairs=tuple(more)))
    wrong = draw(st.sampled_from(choices))
    return replace(wrong, index_pairs=wrong.pairs)


@proves("T4")
@given(jobs(), st.data())
def test_another_number_of_index_pages_is_refused_before_any_write(job: Job, data: st.DataObject) -> None:
    receiver, messages = job.receiver(), job.messages()
    turn = data.draw(st.integers(0, len(messages) - 1))
    for message in messages[:turn]:
        receiver.accept(message)
    before = receiver.fingerprint()
    wrong = data.draw(wrong_counts(messages[turn]))
    assert refusal(receiver.accept, wrong) is not None
    assert receiver.fingerprint() == before
    receiver.accept(messages[turn])
    assert not receiver.check()


@proves("T3")
@given(jobs(), st.data())
def test_a_message_that_contradicts_the_others_is_refused(job: Job, data: st.DataObject) -> None:
    receiver, messages = job.receiver(), job.messages()
    assume(len(messages) > 1)
    turn = data.draw(st.integers(0, len(messages) - 1))
    for message in messages[:turn] + messages[turn + 1 :]:
        receiver.accept(message)
    before = receiver.fingerprint()
    wrong = data.draw(contradictions(job, messages[turn]))
    assert refusal(receiver.accept, wrong) is not None
    assert receiver.fingerprint() == before
    receiver.accept(messages[turn])
    assert receiver.done()
    assert not receiver.check()


@proves("T3")
@given(jobs(), st.data())
def test_a_repeat_that_says_something_else_is_refused(job: Job, data: st.DataObject) -> None:
    receiver, messages = job.receiver(), job.messages()
    assume(len(messages) > 1)
    for message in messages[:-1]:
        receiver.accept(message)
    before = receiver.fingerprint()
    first = data.draw(st.sampled_from(messages[:-1]))
    moved = tuple(Pair(pair.local_page + 1, pair.position) for pair in first.pairs)
    other = replace(first, pairs=moved, index_pairs=moved)
    wrong = other if moved else replace(first, is_last=not first.is_last)
    assert refusal(receiver.accept, wrong) is not None
    assert receiver.fingerprint() == before


@proves("X1")
@given(jobs(), st.integers(1, 5))
def test_decode_with_another_page_size_is_refused(job: Job, page_size: int) -> None:
    pages = tuple(range(1, 1 + num_pages(job.tokens, page_size)))
    registration = Registration(7, job.tokens, pages, page_size)
    error = refusal(Receiver, registration, job.grid)
    assert (error is None) == (page_size == job.grid.page_size)


def test_a_lost_message_is_named() -> None:
    job = Job(Grid(2, 64), (4, 9, 12, 7), (3, 2, 1, 5), (130, 250))
    receiver = job.receiver()
    assert receiver.missing() == tuple(Missing(rank, 0, (0, 1, 2, 3)) for rank in (0, 1))
    first, second, third, fourth = job.messages()
    receiver.accept(second)
    assert receiver.missing() == (
        Missing(0, 0, (0,)),
        Missing(0, 1, (2, 3)),
        Missing(1, 1, (2, 3)),
    )
    receiver.accept(third)
    receiver.accept(fourth)
    assert receiver.missing() == (Missing(0, 0, (0,)),)
    assert receiver.accept(first) == (3,)


# -- bytes ---------------------------------------------------------------------------------------------------


class Prefill:
    """The shards of all ranks and the replicated baseline beside them, of one cache."""

    def __init__(self, job: Job, cache: Cache, row_format: Format) -> None:
        W, local_pages = job.grid.world_size, 1 + max(job.pages) // job.grid.world_size
        self.job, self.cache, self.format = job, cache, row_format
        self.shards = [empty_shard(job.grid, rank, row_format, local_pages) for rank in range(W)]
        self.replica = empty_replica(job.grid.page_size, row_format, local_pages * W)
        self.decode = empty_shard(Grid(1, job.grid.page_size), 0, row_format, 1 + max(job.decode_pages))

    def forward(self, start: int, end: int) -> None:
        """Write positions [start, end)."""
        positions, pages = torch.arange(start, end), torch.tensor(self.job.pages)
        rows = self.format.encode(pack(request=0, position=positions, layer=0, cache=self.cache, write=0))
        slots = PageTable(pages, self.job.grid).slots(positions)
        for shard in self.shards:
            physical = to_physical(slots, shard.rank, self.job.grid)
            shard.write(destinations(physical, shard.num_slots, shard.rank), rows)
        self.replica.write(pages, start, rows)


@proves("T5")
@settings(max_examples=60)
@given(jobs(), st.sampled_from(FORMATS), st.sampled_from(FORMATS), st.data())
def test_decode_holds_the_bytes_of_the_replicated_cache(
    job: Job, kv: Format, index: Format, data: st.DataObject
) -> None:
    caches = [Prefill(job, Cache.KV, kv), Prefill(job, Cache.INDEX, index)]
    senders, receiver, start = job.senders(), job.receiver(), 0
    on_the_way: list[tuple[Message, list[torch.Tensor]]] = []
    for end in job.ends:
        for cache in caches:
            cache.forward(start, end)
        for sender in senders:
            message = sender.send(job.pages, end, is_last=end == job.tokens, written=end)
            taken = [take_pages(cache.shards[message.rank], message.pairs) for cache in caches]
            on_the_way.append((message, taken))
        start = end
    for message, taken in data.draw(st.permutations(on_the_way)):
        places = receiver.accept(message)
        for cache, pages in zip(caches, taken, strict=True):
            put_pages(cache.decode, places, pages)
    assert receiver.done()
    for cache in caches:
        whole = cache.replica.view([(torch.tensor(job.pages), job.tokens)])
        slots = PageTable(torch.tensor(job.decode_pages), Grid(1, job.grid.page_size)).slots(
            torch.arange(job.tokens)
        )
        assert torch.equal(cache.decode.rows[slots], whole)


@proves("T5")
@given(jobs(), st.sampled_from(FORMATS))
def test_pages_that_nobody_sent_keep_their_bytes(job: Job, row_format: Format) -> None:
    cache = Prefill(job, Cache.KV, row_format)
    cache.forward(0, job.tokens)
    before = cache.decode.pages.clone()
    for message in job.messages():
        places = destination_pages(job.decode_pages, message.pairs)
        put_pages(cache.decode, places, take_pages(cache.shards[message.rank], message.pairs))
    others = sorted(set(range(len(before))) - set(job.decode_pages))
    assert torch.equal(cache.decode.pages[others], before[others])


# -- refusals ------------------------------------------------------------------------------------------------


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


def small_shard() -> Shard:
    return empty_shard(Grid(1, 2), 0, FORMATS[0], 3, poison=0)


@pytest.mark.parametrize("page", [0, 3])
def test_pages_that_a_shard_has_not_are_neither_read_nor_written(page: int) -> None:
    shard = small_shard()
    with pytest.raises(InvalidInput, match=rf"1 … 2; 0 is the dummy page, got {page} \(rank 0\)"):
        take_pages(shard, [Pair(page, 0)])
    with pytest.raises(InvalidInput, match=rf"1 … 2; 0 is the dummy page, got {page} \(rank 0\)"):
        put_pages(shard, [1, page], torch.ones(2, 16, dtype=torch.uint8))
    assert not shard.pages.any()


def test_pages_of_another_size_are_not_written() -> None:
    shard = small_shard()
    with pytest.raises(InvalidInput, match=r"expected \[1, 16\], got \[1, 8\]"):
        put_pages(shard, [1], torch.ones(1, 8, dtype=torch.uint8))
    assert not shard.pages.any()
