"""Operations that ranks do together: references, cases, and candidates on worlds (laws S4, V1, V6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from properties.gpu_marks import needs_gpus
from properties.kernels import faults
from properties.kernels.across import try_case
from properties.kernels.adversaries import collective as adversaries
from properties.kernels.adversaries.adversary import Adversary, adversaries_of
from properties.kernels.cases.collective import AcrossCase, GatherMaterialize, GatherRerange
from properties.kernels.handling import few_handlings
from properties.proofs import proves
from refmodel.errors import Finding, InvalidInput
from refmodel.ops.collective import GATHER_RERANGE
from refmodel.ops.declare import Capabilities
from refmodel.ops.op import Op, Results
from sim.kernels.candidate import Candidate
from sim.kernels.loading import named
from sim.world import World

KINDS = (GatherRerange, GatherMaterialize)
WRONG = tuple(adversaries_of(adversaries))


def by_reference(group: dist.ProcessGroup, case: AcrossCase) -> Results:
    return case.op.reference(**case.arguments_of(group.rank()), group=group)


def results(case: AcrossCase) -> list[torch.Tensor]:
    """Of every rank."""
    return [result for (result,) in World.lockstep(case.world).run(by_reference, case)]


# -- the references, token by token ------------------------------------------------------------------------


def segment_of_token(position: int, prefix: int, tokens: int, world: int, page: int) -> int:
    """By the definition: page units, the first of which may be half full, in 2W segments (S2)."""
    first, units = prefix // page, -(-(prefix + tokens) // page) - prefix // page
    whole, more = divmod(units, 2 * world)
    stops = [whole * (i + 1) + min(i + 1, more) for i in range(2 * world)]
    return next(i for i, stop in enumerate(stops) if position // page - first < stop)


@proves("S4", "S2", "S3", "V6")
@given(GatherRerange.strategy())
def test_gathered_rows_are_in_batch_order(case: GatherRerange) -> None:
    expected: dict[tuple[int, int], list[float]] = {}
    for rank in range(case.world):
        rows = iter(case.arguments_of(rank)["local"].tolist())
        for segment in (rank, 2 * case.world - 1 - rank):
            for request, (prefix, tokens) in enumerate(zip(case.prefixes, case.tokens, strict=True)):
                for position in range(prefix, prefix + tokens):
                    if segment_of_token(position, prefix, tokens, case.world, case.page) == segment:
                        expected[request, position] = next(rows)
        assert not list(rows)
    for batch in results(case):
        assert batch.tolist() == [expected[token] for token in sorted(expected)]


@proves("V1", "V2", "V7", "V6")
@given(GatherMaterialize.strategy())
def test_a_materialized_row_is_that_of_its_slot(case: GatherMaterialize) -> None:
    shards = [case.arguments_of(rank)["shard"] for rank in range(case.world)]
    table = case.arguments_of(0)["page_table"]
    expected = []
    for request, tokens in enumerate(case.valid):
        for position in range(tokens):
            page, slot = int(table[request, position // case.page]), position % case.page
            stored, first = shards[page % case.world][page // case.world], 0
            for size in case.fields:
                expected += stored[first + slot * size : first + (slot + 1) * size].tolist()
                first += case.page * size
    for view in results(case):
        assert view.flatten().tolist() == expected


# -- cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_cases_are_made_again_from_json_and_from_code(kind: type[AcrossCase]) -> None:
    for case in kind.corners():
        for again in (msgspec.json.decode(msgspec.json.encode(case), type=kind), eval(repr(case))):
            assert again == case
            for rank in range(case.world):
                here, there = case.arguments_of(rank), again.arguments_of(rank)
                assert [*here] == [
                    argument.name for argument in case.op.arguments if argument.name != "group"
                ]
                for name, value in here.items():
                    same = (
                        torch.equal(value, there[name])
                        if isinstance(value, torch.Tensor)
                        else value == there[name]
                    )
                    assert same, name
        assert case.on(3).world == 3


def test_corners_have_ranks_without_anything() -> None:
    assert any(0 in case.plan().row_counts for case in GatherRerange.corners())
    assert any(
        len(set((case.pages() % case.world).tolist())) < case.world for case in GatherMaterialize.corners()
    )


def test_what_is_no_case_is_refused() -> None:
    for wrong in (
        lambda: GatherRerange(world=2, page=4, prefixes=(0,), tokens=(1, 2)),
        lambda: GatherRerange(world=2, page=4, prefixes=(), tokens=()),
        lambda: GatherMaterialize(world=2, page=4, valid=(0,)),
        lambda: GatherMaterialize(world=2, page=4, valid=(-1, 3)),
        lambda: GatherMaterialize(world=2, page=4, valid=(3,), fields=()),
    ):
        with pytest.raises(InvalidInput):
            wrong()


# -- candidates on worlds ----------------------------------------------------------------------------------


def right(op: Op) -> Candidate:
    return Candidate(op, lambda *arguments: op.reference(*arguments))


@proves("V6")
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_passes(kind: type[AcrossCase]) -> None:
    candidate = right(kind.op)
    for number, case in enumerate(kind.corners()):
        ways = few_handlings(candidate)
        for handling in (ways[0], ways[1 + number % (len(ways) - 1)]):
            assert try_case(candidate, case, World.lockstep(case.world), handling) is None


def first_finding(wrong: Adversary, world: Callable[[int], World], **more: object) -> Finding | None:
    kind = next(kind for kind in KINDS if kind.op.name == wrong.op)
    candidate = Candidate(kind.op, wrong.function)
    tries = (try_case(candidate, case, world(case.world)) for case in kind.corners())
    return next(filter(None, tries), None)


@proves("S4", "S2", "V1", "V2", "V6")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_adversaries_are_found_out(wrong: Adversary) -> None:
    finding = first_finding(wrong, World.lockstep)
    assert finding is not None
    assert finding.law == wrong.law, finding


@proves("V6")
@pytest.mark.gloo
@pytest.mark.parametrize("name", ["skips_without_rows", "gathers_unpadded", "halves_in_their_own_order"])
def test_on_processes_a_rank_that_calls_otherwise_is_named_and_does_not_hang(
    name: str, gloo_world: Callable[[int], World]
) -> None:
    case = GatherRerange(world=2, page=4, prefixes=(0,), tokens=(1,))
    target = named(f"{adversaries.__name__}:{name}", case.op.name)
    finding = try_case(target.candidate(case.op.name), case, gloo_world(2), named=target)
    assert finding is not None
    assert finding.law == "V6"
    assert "rank 1" in finding.received


@pytest.mark.gloo
def test_on_processes_a_target_is_loaded_by_its_name(gloo_world: Callable[[int], World]) -> None:
    case = GatherRerange(world=2, page=4, prefixes=(3, 0), tokens=(9, 1))
    wrong = named(f"{adversaries.__name__}:ranks_from_the_last", case.op.name)
    finding = try_case(wrong.candidate(case.op.name), case, gloo_world(2), named=wrong)
    assert finding is not None
    assert (finding.law, finding.where.rank) == ("S4", 0)


Kernel = Callable[..., torch.Tensor]


def rerange_with(change: Callable[[int, torch.Tensor], None], *, of: str) -> Kernel:
    """A right kernel that also does something to its argument or its result."""

    def gather_rerange(
        local: torch.Tensor,
        prefixes: tuple[int, ...],
        tokens: tuple[int, ...],
        page_size: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        (rows,) = GATHER_RERANGE.reference(local, prefixes, tokens, page_size, group)
        change(group.rank(), local if of == "argument" else rows)
        return rows

    return gather_rerange


def zero_on_rank_1(rank: int, tensor: torch.Tensor) -> None:
    if rank == 1:
        tensor.zero_()


def raise_on_rank_1(rank: int, tensor: torch.Tensor) -> None:
    if rank == 1:
        raise ValueError("I do not like this rank")


CASE = GatherRerange(world=3, page=2, prefixes=(0,), tokens=(12,))


def test_what_shows_without_a_judge_is_said_of_its_rank() -> None:
    found = try_case(Candidate(CASE.op, rerange_with(zero_on_rank_1, of="argument")), CASE, World.lockstep(3))
    assert found is not None
    assert (found.law, found.what, found.where.rank) == (faults.CHANGED, "local", 1)


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    found = try_case(Candidate(CASE.op, rerange_with(raise_on_rank_1, of="result")), CASE, World.lockstep(3))
    assert found is not None
    assert (found.law, found.where.rank) == (faults.RAISES, 1)
    assert "raise_on_rank_1" in found.received
    assert found.received.endswith("ValueError: I do not like this rank")


@dataclass(frozen=True, kw_only=True)
class LaxRerange(GatherRerange):
    op: ClassVar[Op] = replace(GATHER_RERANGE, judge=lambda *_: None)


@proves("V6")
def test_ranks_must_have_the_same_whatever_the_judge_allows() -> None:
    case = LaxRerange(world=3, page=2, prefixes=(0,), tokens=(12,))
    finding = try_case(Candidate(case.op, rerange_with(zero_on_rank_1, of="result")), case, World.lockstep(3))
    assert finding is not None
    assert (finding.expected, finding.where.rank) == ("the same bits on every rank", 1)


def test_declared_deterministic_is_tried_on_every_rank() -> None:
    calls: list[int] = []

    def other_bits_at_times(rank: int, tensor: torch.Tensor) -> None:
        calls.append(rank)
        tensor += calls.count(rank) // 5

    kernel = rerange_with(other_bits_at_times, of="result")
    case = LaxRerange(world=3, page=2, prefixes=(0,), tokens=(12,))
    for deterministic, law in ((False, None), (True, faults.REPEAT)):
        calls.clear()
        declared = Capabilities(deterministic=deterministic)
        finding = try_case(Candidate(case.op, kernel, declared), case, World.lockstep(3))
        assert (finding and finding.law) == law


def test_a_case_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="ranks of a case"):
        try_case(right(CASE.op), CASE, World.lockstep(2))


def passes(kind: type[AcrossCase], world: World) -> None:
    target = named("properties.kernels.references", kind.op.name)
    for case in kind.corners():
        assert try_case(right(kind.op), case.on(world.size), world, named=target) is None


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_passes_on_processes(
    kind: type[AcrossCase], gloo_world: Callable[[int], World]
) -> None:
    passes(kind, gloo_world(2))


@pytest.mark.nccl
@needs_gpus(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_passes_on_gpus(kind: type[AcrossCase]) -> None:
    with World.nccl(2) as world:
        passes(kind, world)
