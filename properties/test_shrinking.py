"""A failing history is made smaller until nothing can go."""

from __future__ import annotations

from properties.shrinking import renamed, shrunk
from sim.histories.history import Backup, Evict, History, Prefetch, Resend, Send, Spoil, Step, Submit


def test_a_history_is_shrunk_to_what_matters() -> None:
    steps = [Step(submit=Submit(name, 30)) for name in "abcdef"]
    history = History("T", "W", ["L1"], 8, 16, 6, steps, prefetch=True)
    small = shrunk(history, lambda h: sum(s.submit.tokens > 2 for s in h.history if s.submit) > 1)
    assert [step.submit for step in small.history if step.submit] == [
        Submit(step.submit.request, 3) for step in small.history if step.submit
    ]
    assert (len(small.history), small.world_size, small.page_size, small.prefetch) == (2, 1, 1, False)


def test_a_prompt_like_one_that_goes_begins_as_that_one_did() -> None:
    steps = [
        Step(submit=Submit("a", 9)),
        Step(submit=Submit("b", 9, "a", 7)),
        Step(submit=Submit("c", 9, "b", 5)),
    ]
    history = History("T", "W", ["L1"], 1, 1, 9, steps)

    def fails(tried: History) -> bool:
        """What c begins with is a's."""
        begins = {step.submit.request: step.submit.like for step in tried.history if step.submit}
        first = "c"
        while (like := begins.get(first)) is not None:
            first = like
        return first == "a" and "a" in begins and "c" in begins

    small = renamed(shrunk(history, fails))
    assert [step.submit for step in small.history] == [Submit("a", 1), Submit("b", 1, "a", 1)]


def test_fewer_lanes_may_have_as_many_pages() -> None:
    history = History("T", "W", ["L1"], 3, 1, 2, [Step(submit=Submit("a", 1)), Step(evict=Evict(2, 1))])
    small = shrunk(
        history, lambda h: h.world_size * h.pages_per_lane >= 6 and any(s.evict for s in h.history)
    )
    assert (small.world_size, small.pages_per_lane) == (1, 6)
    assert small.history == [Step(evict=Evict(0, 1))]


def test_pressure_follows_a_request_that_begins_at_another_rank() -> None:
    """The last request lies in one lane, which is another without those before it."""
    steps = [*(Step(submit=Submit(name, 1)) for name in "abc"), Step(evict=Evict(2, 1))]
    history = History("T", "W", ["L1"], 3, 1, 2, steps, rotate=True)

    def fails(tried: History) -> bool:
        last = sum(step.submit is not None for step in tried.history) - 1
        evicted = [step.evict.lane for step in tried.history if step.evict]
        return tried.world_size == 3 and tried.rotate and last >= 0 and evicted == [last % 3]

    small = renamed(shrunk(history, fails))
    assert small.history == [Step(submit=Submit("a", 1)), Step(evict=Evict(0, 1))]


def test_requests_are_renamed_wherever_they_are_named() -> None:
    steps = [
        Step(submit=Submit("x", 9)),
        Step(submit=Submit("y", 9, "x", 4)),
        Step(forward=["y", "x"]),
        Step(send=Send("y")),
        Step(resend=Resend("y", [0])),
        Step(cancel="y"),
        Step(backup=Backup("x", 0, 4)),
        Step(prefetch=Prefetch("nobody", 1)),
        Step(spoil=Spoil("y", 0, "kv", "lose")),
    ]
    again = renamed(History("T", "W", ["L1"], 2, 4, 3, steps)).history
    assert again[1].submit == Submit("b", 9, "a", 4)
    assert (again[2].forward, again[5].cancel) == (["b", "a"], "b")
    assert (again[3].send, again[4].resend) == (Send("b"), Resend("b", [0]))
    assert (again[6].backup, again[7].prefetch) == (Backup("a", 0, 4), Prefetch("nobody", 1))
    assert again[8].spoil == Spoil("b", 0, "kv", "lose")


def test_features_that_do_not_matter_go_first() -> None:
    steps = [Step(submit=Submit("a", 9)), Step(send=Send("a", 4, lose=(0, 1, 2), late=(3,)))]
    history = History(
        "T", "W", ["L1"], 4, 4, 6, steps, host_pages_per_lane=3, storage=True, draft_layers=2, decode_pages=9
    )
    small = shrunk(history, lambda h: any(2 in step.send.lose for step in h.history if step.send))
    assert (small.host_pages_per_lane, small.storage, small.draft_layers, small.decode_pages) == (
        0,
        False,
        0,
        None,
    )
    assert small.history == [Step(send=Send("a", lose=(2,)))]
