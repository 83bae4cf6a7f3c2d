"""Laws T3, T4, X1: what decode accepts, what it refuses, and what it knows to be missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.transfer_jobs import Job, jobs, refusal
from refmodel.layout.geometry import Grid, num_pages
from refmodel.serving.receiver import Missing, Receiver, Registration
from refmodel.serving.transfer import Message, Pair


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
