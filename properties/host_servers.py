"""Servers with a host cache, and requests that come back to them, as properties draw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from refmodel.errors import Finding
from refmodel.layout.geometry import Grid
from refmodel.layout.split import Split
from refmodel.serving.host_layouts import FITTING, CopyEngine
from refmodel.storage.reuse import ViewPath
from sim.gate.histories import REFUSAL, try_history
from sim.histories.history import (
    After,
    DropHost,
    Evict,
    History,
    Step,
    Submit,
)
from sim.world import World

PLENTY = 64  # pages of a lane where none is ever short


@dataclass(frozen=True, slots=True)
class Server:
    """Settings of a history, as far as these properties draw them."""

    grid: Grid
    options: dict[str, object]

    def history(self, steps: Sequence[Step], **more: object) -> History:
        settings_of_it = {"pages_per_lane": PLENTY, "host_pages_per_lane": PLENTY} | self.options | more
        return History(
            title="drawn",
            why="drawn",
            laws=["H1"],
            world_size=self.grid.world_size,
            page_size=self.grid.page_size,
            history=list(steps),
            **settings_of_it,  # type: ignore[arg-type]
        )

    @property
    def pages_per_lane(self) -> int:
        return int(str(self.options.get("pages_per_lane", PLENTY)))

    def empty(self, *, host: bool = False) -> Iterator[Step]:
        """Every page that nobody uses leaves the device, or the host."""
        for lane in range(self.grid.world_size):
            whole_lane = Evict(lane, self.pages_per_lane)
            yield Step(drop_host=DropHost(lane, PLENTY)) if host else Step(evict=whole_lane)


ENGINES = [(layout, engine) for engine in CopyEngine for layout in FITTING[engine]]


@st.composite
def servers(draw: st.DrawFn) -> Server:
    """Small ones of all kinds, with room for everything."""
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    layout, engine = draw(st.sampled_from(ENGINES))
    options: dict[str, object] = {
        "hit": draw(st.sampled_from(["token", "page"])),
        "split": draw(st.sampled_from([Split.PAGE_ALIGNED, Split.TOKEN_BALANCED])),
        "view": draw(st.sampled_from([ViewPath.FULL, ViewPath.CURRENT, ViewPath.PARTIAL])),
        "prefetch": draw(st.booleans()),
        "layers": draw(st.integers(1, 2)),
        "draft_layers": draw(st.integers(0, 1)),
        "host_layout": layout,
        "copy_engine": engine,
        "rotate": draw(st.booleans()),
    }
    return Server(grid, options)


def findings(history: History) -> list[Finding]:
    """What is wrong, but for steps that were refused: what is drawn does not know which those are."""
    with World.lockstep(history.world_size) as world:
        verdict = try_history(world, history)
    return [finding for finding in verdict.findings if finding.law != REFUSAL]


def longest_hit(whole_pages: int, prompt: int, server: Server) -> int:
    """Tokens hit, if so many first pages of a prompt are there: one token is left to compute (L4)."""
    P = server.grid.page_size
    if server.options["hit"] == "page":
        return min(whole_pages, (prompt - 1) // P) * P
    return min(whole_pages * P, prompt - 1)


def first_request(server: Server, tokens: int) -> list[Step]:
    """It has been and gone, and the device has forgotten it."""
    life = [Step(submit=Submit("a", tokens)), Step(forward=["a"]), Step(finish="a")]
    return [*life, *server.empty()]


def second_request(tokens: int, shared: int, hit: int) -> list[Step]:
    """It shares so many tokens, and must hit so many of them."""
    submit = Step(submit=Submit("b", tokens, "a", shared), expect=After(valid={"b": hit}))
    return [submit, Step(forward=["b"]), Step(decode=["b"]), Step(finish="b")]
