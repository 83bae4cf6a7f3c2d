"""Any sequence of collectives gives the same results and the same ledgers in every world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.gpu_marks import needs_gpus
from properties.proofs import proves
from refmodel.collectives import all_gather_rows, device_of
from sim.world import World

# torch does not export it.
coalescing: Any = vars(dist)["_coalescing_manager"]

Worlds = Callable[..., World]


class Step(NamedTuple):
    """One collective. The same value on all ranks."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    group: int  # 0: of all ranks; 1, 2: of some
    root: int  # modulo the size of the group
    fold: str
    counts: tuple[int, ...]  # rows of each rank; of rank r to rank s, counts[r] + counts[s]
    is_async: bool


@dataclass(frozen=True)
class Part:
    """One rank's part in a step: what it sends, and calls that give (what it receives, work)."""

    step: Step
    place: int
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def device(self) -> torch.device:
        return device_of(self.group)

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def root(self) -> int:
        return self.step.root % self.size

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.step.fold)

    def numbers(self, *shape: int, of: int | None = None) -> torch.Tensor:
        """Small integers: sums and products of four are exact in each type, whatever the order."""
        of = self.rank if of is None else of
        generator = torch.Generator().manual_seed(100 * self.place + of)
        return torch.randint(0, 4, shape, generator=generator).to(self.device, self.step.dtype)

    def sent(self) -> torch.Tensor:
        return self.numbers(*self.step.shape)

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.step.shape, dtype=self.step.dtype, device=self.device)

    def parts(self) -> list[torch.Tensor]:
        return [self.zeros() for _ in range(self.size)]

    def perform(self) -> tuple[Any, Any]:
        return PERFORM[self.step.kind](self)

    @property
    def common(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.step.is_async}


def all_gather(part: Part) -> tuple[Any, Any]:
    parts = part.parts()
    return parts, dist.all_gather(parts, part.sent(), **part.common)


def all_gather_single(part: Part) -> tuple[Any, Any]:
    whole = torch.cat(part.parts())
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return whole, gather(whole, part.sent(), **part.common)


def gather_rows(part: Part) -> tuple[Any, Any]:
    counts = part.step.counts[: part.size]
    rows = part.numbers(counts[part.rank], 2)
    return all_gather_rows(rows, counts, group=part.group, site=f"step {part.place}"), None


def all_reduce(part: Part) -> tuple[Any, Any]:
    total = part.sent()
    return total, dist.all_reduce(total, part.op, **part.common)


def coalesced(part: Part) -> tuple[Any, Any]:
    totals = [part.sent(), part.numbers(2)]
    with coalescing(group=part.group):
        for total in totals:
            dist.all_reduce(total, part.op, group=part.group)
    return totals, None


def all_to_all_single(part: Part) -> tuple[Any, Any]:
    counts = part.step.counts
    splits = [counts[part.rank] + counts[other] for other in range(part.size)]
    received = torch.zeros(sum(splits), 2, dtype=part.step.dtype, device=part.device)
    sent = part.numbers(sum(splits), 2)
    return received, dist.all_to_all_single(received, sent, splits, splits, **part.common)


def barrier(part: Part) -> tuple[Any, Any]:
    return None, dist.barrier(**part.common)


def broadcast(part: Part) -> tuple[Any, Any]:
    told = part.sent()
    return told, dist.broadcast(told, group_src=part.root, **part.common)


def gather(part: Part) -> tuple[Any, Any]:
    taken = part.parts() if part.rank == part.root else None
    return taken, dist.gather(part.sent(), taken, group_dst=part.root, **part.common)


def objects(part: Part) -> tuple[Any, Any]:
    told: list[Any] = [None] * part.size
    dist.all_gather_object(told, {"rank": part.rank, "place": part.place}, group=part.group)
    return told, None


def reduce(part: Part) -> tuple[Any, Any]:
    total = part.sent()
    work = dist.reduce(total, op=part.op, group_dst=part.root, **part.common)
    return (total if part.rank == part.root else None), work  # elsewhere it is undefined


def reduce_scatter(part: Part) -> tuple[Any, Any]:
    total, sent = part.zeros(), [part.sent() + place for place in range(part.size)]
    return total, dist.reduce_scatter(total, sent, part.op, **part.common)


def reduce_scatter_single(part: Part) -> tuple[Any, Any]:
    total = part.zeros()
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return total, scatter(total, torch.cat([part.sent()] * part.size), part.op, **part.common)


def ring(part: Part) -> tuple[Any, Any]:
    received = part.zeros()
    if part.size == 1:
        return received, None
    after, before = (part.rank + 1) % part.size, (part.rank - 1) % part.size
    works = [
        dist.isend(part.sent(), group=part.group, group_dst=after),
        dist.irecv(received, group=part.group, group_src=before),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return received, None


def scatter(part: Part) -> tuple[Any, Any]:
    received, given = part.zeros(), None
    if part.rank == part.root:
        given = [part.numbers(*part.step.shape, of=other) for other in range(part.size)]
    return received, dist.scatter(received, given, group_src=part.root, **part.common)


PERFORM: dict[str, Callable[[Part], tuple[Any, Any]]] = {
    function.__name__: function
    for function in (
        all_gather,
        all_gather_single,
        all_reduce,
        all_to_all_single,
        barrier,
        broadcast,
        coalesced,
        gather,
        gather_rows,
        objects,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        ring,
        scatter,
    )
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8)

sequences = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(sorted(PERFORM)),
        dtype=st.sampled_from(DTYPES),
        shape=st.sampled_from([(1,), (3,), (2, 3), (1, 2, 2)]),
        group=st.integers(0, 2),
        root=st.integers(0, 3),
        fold=st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX"]),
        counts=st.tuples(*[st.integers(0, 3)] * 4),
        is_async=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def members(size: int, group: int) -> list[int]:
    return [list(range(size)), list(range((size + 1) // 2)), list(range(0, size, 2))][group]


def perform(group: dist.ProcessGroup, sequence: list[Step]) -> list[Any]:
    """What this rank receives in each step that it has a part in. Asynchronous ones end with the run."""
    size, rank = group.size(), group.rank()
    groups = [group, *(dist.new_group(members(size, number)) for number in (1, 2))]
    mine = [
        Part(step, place, groups[step.group]).perform()
        for place, step in enumerate(sequence)
        if rank in members(size, step.group)
    ]
    for _, work in mine:
        if work is not None:
            work.wait()
    return [result for result, _ in mine]


def plain(value: Any) -> Any:
    """Comparable: dtype, shape and numbers of tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@proves("V6")
@pytest.mark.gloo
@given(size=st.integers(2, 4), sequence=sequences, seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_lockstep_and_gloo_agree(gloo_world: Worlds, size: int, sequence: list[Step], seed: int) -> None:
    ours = World.lockstep(size, seed=seed).execute(perform, sequence)
    theirs = gloo_world(size).execute(perform, sequence)
    assert plain(ours.results) == plain(theirs.results)
    assert ours.ledgers == theirs.ledgers


@proves("V6")
@given(size=st.integers(1, 4), sequence=sequences, seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
@settings(deadline=None)
def test_no_schedule_changes_a_result(size: int, sequence: list[Step], seeds: tuple[int, int]) -> None:
    first, second = (World.lockstep(size, seed=seed).execute(perform, sequence) for seed in seeds)
    assert plain(first.results) == plain(second.results)
    assert first.ledgers == second.ledgers


@proves("V6")
@pytest.mark.nccl
@needs_gpus(1)
@given(size=st.integers(1, 4), sequence=sequences, seed=st.integers(0, 99))
@settings(deadline=None)
def test_ranks_that_share_a_gpu_agree_with_the_cpu(size: int, sequence: list[Step], seed: int) -> None:
    ours = World.lockstep(size, seed=seed, device="cuda").execute(perform, sequence)
    theirs = World.lockstep(size, seed=seed).execute(perform, sequence)
    assert plain(ours.results) == plain(theirs.results)
    assert ours.ledgers == theirs.ledgers
