"""A model of a transfer that knows tokens and messages, and no pages; histories drawn with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from refmodel.layout.geometry import num_pages
from refmodel.layout.split import Split
from sim.histories.history import History, Resend, Send, Step, Submit


@dataclass
class Life:
    """One request. Each method does a step, and says whether it must be accepted."""

    world_size: int
    page_size: int
    chunk: int | None
    tokens: int
    valid: int = 0
    has_left: bool = False
    cancelled: bool = False
    sent: list[int] = field(default_factory=list)  # tokens of whole pages sent, after each chunk
    is_over: bool = False  # the last chunk was sent
    lost: set[tuple[int, int]] = field(default_factory=set)  # (rank, chunk)
    late: set[tuple[int, int]] = field(default_factory=set)
    rows: int = 0  # rows that were compared with the truth, of one cache and layer

    @property
    def done(self) -> bool:
        return self.is_over and not self.lost and not self.late and not self.cancelled

    @property
    def settled(self) -> bool:
        return not self.sent or self.done or self.cancelled

    def sensible(self) -> list[str]:
        """Operations that may be accepted; those of a transfer more often."""
        complete = self.valid == self.tokens
        under_way = bool(self.sent) and not self.settled
        weights = {
            "forward": 2 * (not complete),
            "send": 3 * (self.valid > 0 and not self.is_over and not self.cancelled),
            "resend": 6 * (bool(self.lost) and not self.cancelled),
            "cancel": int(under_way),
            "decode": int(complete and self.settled),
            "finish": int(complete and self.settled),
        }
        return [name for name, weight in weights.items() for _ in range(0 if self.has_left else weight)]

    def forward(self) -> bool:
        if self.has_left or self.valid == self.tokens:
            return False
        if self.chunk is None or self.tokens - self.valid <= self.chunk:
            self.valid = self.tokens
        else:
            self.valid = (self.valid + self.chunk) // self.page_size * self.page_size
        self.rows += self.valid
        return True

    def decode(self) -> bool:
        if self.has_left or self.valid < self.tokens or not self.settled:
            return False
        self.tokens += 1
        self.valid += 1
        self.rows += self.valid
        return True

    def send(self, wanted: Send) -> bool:
        end = self.valid if wanted.tokens is None else wanted.tokens
        is_last = end == self.tokens
        fates = [*wanted.lose, *wanted.repeat, *wanted.late]
        fits = max([1, *self.sent[-1:]]) <= end <= self.valid
        if self.has_left or self.is_over or self.cancelled or not fits or len(set(fates)) != len(fates):
            return False
        if is_last and wanted.late:
            return False
        self.lost |= {(rank, len(self.sent)) for rank in wanted.lose}
        self.late = {(rank, len(self.sent)) for rank in wanted.late}
        self.sent.append(end // self.page_size * self.page_size)
        self.is_over = is_last
        self._compared()
        return True

    def resend(self, ranks: list[int]) -> bool:
        if self.has_left or self.cancelled or not set(ranks) <= {rank for rank, _ in self.lost}:
            return False
        self.lost = {(rank, chunk) for rank, chunk in self.lost if rank not in ranks}
        self._compared()
        return True

    def _compared(self) -> None:
        """Decode's rows are looked at as it gets the last of them, and as the request leaves."""
        if self.done:
            self.rows += self.tokens

    def cancel(self) -> bool:
        accepted = not self.has_left and bool(self.sent) and not self.done and not self.cancelled
        self.cancelled |= accepted
        return accepted

    def finish(self) -> bool:
        accepted = not self.has_left and self.valid == self.tokens and self.settled
        self.has_left |= accepted
        self.rows += self.valid if accepted and self.done else 0
        return accepted

    def abort(self) -> bool:
        accepted = not self.has_left and self.settled
        self.has_left |= accepted
        return accepted


OPERATIONS = ["forward", "send", "resend", "decode", "cancel", "finish", "abort"]


FATES = ["arrives", "arrives", "lose", "repeat", "late"]


@st.composite
def sends(draw: st.DrawFn, name: str, life: Life) -> Send:
    """Most end where the forward did, and most messages arrive."""
    end = draw(st.sampled_from([None, None, None, max(1, life.valid - 1), life.valid + 1]))
    fates = [draw(st.sampled_from(FATES)) for _ in range(life.world_size)]
    lose, repeat, late = (
        tuple(rank for rank, its in enumerate(fates) if its == fate) for fate in ("lose", "repeat", "late")
    )
    if end is None and life.valid == life.tokens and draw(st.booleans()):
        late = ()  # in the last chunk that is refused
    return Send(name, tokens=end, lose=lose, repeat=repeat, late=late)


@st.composite
def lives(draw: st.DrawFn) -> tuple[History, int]:
    """A history of requests that share nothing, and the rows of each cache and layer to be compared in it."""
    W, P = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    chunk = draw(st.none() | st.integers(P, 4 * P))
    sizes = draw(st.lists(st.integers(1, 9 * P), min_size=1, max_size=2))
    requests = {"ab"[i]: Life(W, P, chunk, tokens) for i, tokens in enumerate(sizes)}
    steps = [Step(submit=Submit(name, life.tokens)) for name, life in requests.items()]
    for _ in range(draw(st.integers(6, 16))):
        name = draw(st.sampled_from(sorted(requests)))
        life = requests[name]
        operation = draw(st.sampled_from(life.sensible() * 3 + OPERATIONS))
        steps.append(draw(step_of(name, life, operation)))
    history = History(
        title="drawn",
        why="drawn",
        laws=["T5"],
        world_size=W,
        page_size=P,
        pages_per_lane=60,  # for all, wherever they lie
        history=steps,
        chunk=chunk,
        layers=draw(st.integers(1, 2)),
        split=draw(st.sampled_from([Split.PAGE_ALIGNED, Split.TOKEN_BALANCED])),
        rotate=draw(st.booleans()),
        decode_pages=sum(num_pages(size + 16, P) for size in sizes),
    )
    return history, sum(life.rows for life in requests.values()) * 2 * history.layers


@st.composite
def step_of(draw: st.DrawFn, name: str, life: Life, operation: str) -> Step:
    """One step, done by the model."""
    wanted: Any = name
    if operation in ("forward", "decode"):
        wanted = [name]
    elif operation == "send":
        wanted = draw(sends(name, life))
    elif operation == "resend":
        lost = sorted({rank for rank, _ in life.lost})
        some = st.sampled_from(lost or [0]) | st.integers(0, life.world_size - 1)
        ranks = draw(st.lists(some, min_size=1, max_size=2, unique=True))
        wanted = Resend(name, ranks)
    if isinstance(wanted, Send):
        accepted = life.send(wanted)
    elif isinstance(wanted, Resend):
        accepted = life.resend(wanted.ranks)
    else:
        accepted = getattr(life, operation)()
    return Step(**{operation: wanted}, refused=not accepted)
