"""Laws T1–T5: what a rank of a prefill group sends, when, and until when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.transfer_jobs import Job, jobs, refusal
from refmodel.layout.geometry import num_pages
from refmodel.serving.transfer import Phase, Sender


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


@proves("T5", "L8")
@given(jobs(), st.integers(0, 2))
def test_a_page_waits_for_the_keys_of_its_tokens(job: Job, overlap: int) -> None:
    P, sent = job.grid.page_size, 0
    sender = Sender(7, 0, job.grid, overlap)
    for end in job.ends:
        message = sender.send(job.pages, end, is_last=end == job.tokens, written=end)
        assert message.first_page == sent
        closed = [page for page in range(len(job.pages)) if (page + 1) * P + overlap <= end]
        sent = len(job.pages) if end == job.tokens else len(closed)
        assert message.stop_page == sent
