"""Laws H1–H5 where device, host and storage are all too small."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from properties.host_servers import Server, findings, servers
from properties.proofs import proves
from refmodel.serving.write_policy import WritePolicy
from sim.histories.history import (
    Backup,
    DropHost,
    History,
    Prefetch,
    Spoil,
    Step,
    Submit,
)


@st.composite
def crowded(draw: st.DrawFn) -> History:
    """A server with too little room everywhere, and any operations, some of which make no sense."""
    drawn = draw(servers())
    server = replace(drawn, options=drawn.options | {"pages_per_lane": draw(st.integers(4, 8))})
    lengths: dict[str, int] = {}
    steps = [step for _ in range(draw(st.integers(3, 12))) for step in _some_steps(draw, server, lengths)]
    P = server.grid.page_size
    return server.history(
        steps,
        host_pages_per_lane=draw(st.integers(2, 6)),
        write_policy=draw(st.sampled_from([WritePolicy.WRITE_THROUGH, *WritePolicy])),
        load_anywhere=draw(st.booleans()),
        storage=draw(st.booleans()),
        chunk=draw(st.sampled_from([None, None, P, 2 * P])),
    )


# What happens: a request is served, or one comes back after the device has forgotten it, and so on.
KINDS = ("served", "served", "returns", "returns", "returns", "waits", "runs", "host", "host", "leaves")


def _some_steps(draw: st.DrawFn, server: Server, lengths: dict[str, int]) -> list[Step]:
    """One thing that happens; ``lengths`` of the prompts so far."""
    kind = draw(st.sampled_from(KINDS))
    if kind in ("served", "waits") or not lengths:
        name, submit = _submitted(draw, server, lengths)
        return [submit, *(_run(draw, name) if kind == "served" else [])]
    name = draw(st.sampled_from(list(lengths)))
    if kind == "returns":
        again = f"r{len(lengths)}"
        tokens = lengths[again] = lengths[name] + draw(st.integers(0, 2))
        submit = Step(submit=Submit(again, tokens, name, lengths[name]))
        before = draw(st.sampled_from([[], *_losses(draw, server, name)]))
        meanwhile = draw(st.sampled_from([[], [], list(server.empty(host=True))]))
        return [*server.empty(), *before, submit, *meanwhile, *_run(draw, again)]
    if kind == "runs":
        return [draw(st.sampled_from([Step(forward=[name]), Step(decode=[name])]))]
    if kind == "leaves":
        return [draw(st.sampled_from([Step(finish=name), Step(abort=name)]))]
    return [draw(st.sampled_from(_of_the_host(draw, server, name)))]


def _losses(draw: st.DrawFn, server: Server, name: str) -> list[list[Step]]:
    """What the host may have lost of a request, and got back from storage."""
    lane, pages = draw(st.integers(0, server.grid.world_size - 1)), draw(st.integers(1, 4))
    lost, back = Step(drop_host=DropHost(lane, pages)), Step(prefetch=Prefetch(name, pages))
    return [[lost], [lost, back], [*server.empty(host=True), back]]


def _run(draw: st.DrawFn, name: str) -> list[Step]:
    """So many chunks, or not even one; then it leaves, if it can."""
    chunks = draw(st.sampled_from([4, 4, 1, 0]))
    return [*[Step(forward=[name])] * chunks, *[Step(finish=name)] * bool(chunks)]


def _submitted(draw: st.DrawFn, server: Server, lengths: dict[str, int]) -> tuple[str, Step]:
    """A prompt that often begins like another one, as far as it can."""
    name, tokens = f"r{len(lengths)}", draw(st.integers(1, 4 * server.grid.page_size + 1))
    like = draw(st.sampled_from(list(lengths))) if lengths else None
    most = min(tokens, lengths[like]) if like else 0
    lengths[name] = tokens
    return name, Step(submit=Submit(name, tokens, like, draw(st.just(most) | st.integers(0, most))))


def _of_the_host(draw: st.DrawFn, server: Server, name: str) -> list[Step]:
    P, page = server.grid.page_size, draw(st.integers(0, 3))
    lane = draw(st.integers(0, server.grid.world_size - 1))
    return [
        Step(drop_host=DropHost(lane, page + 1)),
        Step(drop_host=DropHost(lane, page + 1)),
        Step(backup=Backup(name, 0, (page + 1) * P)),
        Step(prefetch=Prefetch(name, page + 1)),
        Step(prefetch=Prefetch(name, page + 1, {"index": draw(st.integers(0, 4))})),
        Step(spoil=Spoil(name, page, "kv", "corrupt")),
    ]


@proves("H1", "H3", "H4", "H5")
@settings(max_examples=80)
@given(crowded())
def test_nothing_wrong_is_read_where_everything_is_short(history: History) -> None:
    assert not findings(history)
