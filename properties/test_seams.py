"""Kernels in the place of the reference: every seam is reached, and a fault there breaks a law."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from properties.command_line import HOLDS, cpkv, refused
from properties.fuzz import Campaign, hunt
from properties.kernels import references
from properties.kernels.adversaries import ADVERSARIES
from properties.proofs import proves
from refmodel.laws import LAWS
from refmodel.layout import ownership
from refmodel.layout.geometry import Grid
from refmodel.ops.catalogue import OPS
from refmodel.ops.declare import Capabilities
from sim.cases.library import AnyScenario, find_scenarios
from sim.gate.histories import REFUSAL
from sim.gate.kernels import kernel_uses
from sim.gate.runs import Outcome, run_scenario
from sim.gate.setting import Setting
from sim.kernels import in_place as standing
from sim.kernels.called import Called, WrongResult
from sim.kernels.candidate import Candidate
from sim.kernels.in_place import in_place
from sim.kernels.loading import Named, named
from sim.kernels.seams.catalogue import SEAMS
from sim.kernels.seams.seam import Seam, Unsuited
from sim.kernels.uses import Uses
from sim.world import World

Worlds = Callable[[int], World]

# Scenarios that come to each seam.
WHERE = {
    "refmodel.layout.plan.Plan.take": "attention/page-aligned-w2",
    "refmodel.storage.passage.in_batch_order": "worked/prefix-70-tokens-300",
    "refmodel.layout.ownership.to_physical": "worked/tokens-300",
    "refmodel.layout.ownership.owned": "worked/tokens-300",
    "refmodel.storage.view.drop_tails": "worked/tokens-300",
    "refmodel.storage.view.CompactTable.rows_of": "attention/page-aligned-w2",
    "refmodel.serving.transfer.pairs": "transfer/shared-prefix",
    "refmodel.serving.page_groups.check_page_groups": "hostcache/refused",
    "refmodel.serving.draft.embed_local": "draft/old-plan-of-an-equal-batch",
    "refmodel.storage.view.assemble": "reuse/partial-on-a-page",
    "refmodel.storage.shard.Shard.write": "model/no-view-fp8",
    "refmodel.storage.pages.read_rows": "model/no-view-fp8",
    "refmodel.model.model.Model.pack": "model/no-view-fp8",
    "refmodel.serving.host_layouts.HostPool.store": "incidents/host-05-suffix-from-storage",
    "refmodel.serving.host_layouts.HostPool.load": "incidents/host-05-suffix-from-storage",
    "refmodel.attention.indexer.mqa_logits": "attention/page-aligned-w2",
    "refmodel.attention.sparse.sparse_mla in refmodel.model.attend": "attention/page-aligned-w2",
    "refmodel.attention.sparse.sparse_mla in refmodel.attention.sharded": "model/no-view-fp8",
    "refmodel.attention.merge.merge_attended": "model/no-view-fp8",
    "refmodel.attention.merge.merge_top_k": "model/no-view-fp8",
    "refmodel.storage.passage.gather_rows": "worked/prefix-70-tokens-300",
    "refmodel.storage.view.materialize": "worked/tokens-300",
}
CHOICE = {
    "topk_transform_paged": "incidents/fmt-02-all-zero-tile",
    "topk_transform_ragged": "model/f32-ragged",
}

# Of each operation wrong kernels, where they show, and as which law. What is in bytes shows as V1.
WRONG = [
    ("zigzag_split", "cut_by_tokens", "radix/a-conversation", "V1"),
    ("rerange", "prefix_forgotten", "worked/prefix-70-tokens-300", "V1"),
    ("logical_to_physical", "logical_slots_of_its_own", "radix/whole-prompt-by-pages", "V1"),
    ("owner_mask", "owned_token_by_token", "worked/prefix-70-tokens-300", "V1"),
    ("tail_mask", "tail_of_the_last_request", "incidents/draft-01-sliced-before-the-shift", "V1"),
    ("current_reuse_remap", "pages_follow_each_other", "attention/page-aligned-w2", "A5"),
    ("transfer_pairs", "in_order_of_the_list", "transfer/lost-message-named", "T3"),
    ("validate_page_groups", "lengths_only", "incidents/host-01-shifted-page-group", REFUSAL),
    ("local_embedding", "padding_in_front", "draft/old-plan-of-an-equal-batch", "D1"),
    ("materialize", "table_of_the_first_request", "incidents/draft-01-sliced-before-the-shift", "V1"),
    ("mla_write", "unowned_rows_not_skipped", "placement/scrambled-w2", "V1"),
    ("mla_write", "minus_one_is_the_last_slot", "incidents/split-02-last-token-lost", "O3"),
    ("mla_read", "read_in_order_of_slots", "model/no-view-fp8", "A5"),
    ("index_write", "scale_behind_each_key", "incidents/fmt-03-one-scale-for-the-tensor", "V1"),
    ("index_read", "one_scale_a_page", "model/no-view-fp8", "A2"),
    ("quantize_index", "scale_turned_over", "model/no-view-fp8", "A2"),
    ("quantize_mla", "rope_before_the_scales", "model/no-view-fp8", "A5"),
    ("page_copy", "sorted_on_one_side", "incidents/host-05-suffix-from-storage", "V1"),
    ("mqa_logits", "own_key_left_out", "attention/page-aligned-w2", "A2"),
    ("sparse_mla", "rope_in_the_value", "incidents/topk-01-ties", "A5"),
    ("sparse_mla", "rope_in_the_value", "model/no-view-fp8", "A5"),
    ("lse_merge", "plain_mean", "incidents/attn-03-no-keys-lse-plus-infinity", "A5"),
    ("topk_transform_paged", "page_table_of_request_0", "attention/rotation-w3", "A2"),
    ("topk_transform_ragged", "offset_forgotten", "model/f32-ragged", "A2"),
    ("topk_merge", "first_part_alone", "model/no-view-fp8", "A2"),
    ("gather_rerange", "prefix_forgotten", "worked/prefix-70-tokens-300", "V1"),
    ("gather_materialize", "pages_in_rank_order", "placement/scrambled-w2", "V1"),
    ("gather_materialize", "skips_without_pages", "worked/tokens-100", "V6"),
]


@cache
def scenario(name: str) -> AnyScenario:
    (found,) = find_scenarios(name)
    return found


def outcome(name: str, kernels: Named | None = None, world: Worlds = World.lockstep) -> Outcome:
    found = scenario(name)
    return run_scenario(found, world(found.world_size), Setting(kernels=kernels))


plain = cache(outcome)


def right(op: str) -> Named:
    """The reference of one operation as a target."""
    return named(f"{references.__name__}:{op}")


def wrong(op: str, name: str) -> Named:
    (adversary,) = (one for one in ADVERSARIES if (one.op, one.name) == (op, name))
    return named(f"{adversary.function.__module__}:{name}", op)


ALL = [seam for seams in SEAMS.values() for seam in seams]


def place_of(seam: Seam) -> str:
    return CHOICE.get(seam.op) or WHERE[seam.place]


# -- right kernels, wrong kernels --------------------------------------------------------------------------


def test_every_operation_has_a_seam() -> None:
    assert set(SEAMS) == set(OPS)


@proves("V1", "A5", "V6")
@pytest.mark.parametrize("seam", ALL, ids=lambda seam: f"{seam.op} at {seam.place.rpartition('.')[2]}")
def test_the_reference_in_its_own_place_changes_nothing(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "SEAMS", {seam.op: (seam,)})  # by itself, to see that this one is reached
    name = place_of(seam)
    here = outcome(name, right(seam.op))
    assert here.uses.calls[seam.op] > 0
    assert not here.findings
    assert here.digest == plain(name).digest


@proves("V1", "V6")
@pytest.mark.parametrize("name", ["worked/tokens-300", "model/no-view-fp8", "transfer/shared-prefix"])
def test_all_at_once_change_nothing(name: str) -> None:
    here = outcome(name, named(references.__name__))
    assert len(here.uses.calls) > 2
    assert not here.findings
    assert here.digest == plain(name).digest


@proves("V1", "V6", "A2", "A5", "T3", "D1", "O3")
@pytest.mark.parametrize(("op", "kernel", "name", "law"), WRONG, ids=lambda part: part.rpartition("/")[2])
def test_a_wrong_kernel_breaks_a_law(op: str, kernel: str, name: str, law: str) -> None:
    here = outcome(name, wrong(op, kernel))
    assert law in {*LAWS, REFUSAL}
    assert here.findings[0].law == law
    assert here.replay.endswith(f"--kernels {wrong(op, kernel).text}")
    assert not plain(name).findings


def test_a_wrong_kernel_is_known_for_every_operation() -> None:
    assert {op for op, *_ in WRONG} == set(OPS)


# -- the same in every world -------------------------------------------------------------------------------


@proves("V1", "V6")
@pytest.mark.gloo
@pytest.mark.parametrize("name", ["worked/tokens-300", "model/no-view-fp8"])
def test_on_processes_it_is_the_same(name: str, gloo_world: Worlds) -> None:
    target = named(references.__name__)
    here, there = outcome(name, target), outcome(name, target, gloo_world)
    assert not there.findings
    assert (here.digest, here.uses) == (there.digest, there.uses)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("op", "kernel", "name", "law"),
    [row for row in WRONG if row[1] in ("pages_in_rank_order", "in_order_of_the_list", "plain_mean")],
)
def test_on_processes_a_wrong_kernel_breaks_the_same_law(
    op: str, kernel: str, name: str, law: str, gloo_world: Worlds
) -> None:
    assert outcome(name, wrong(op, kernel), gloo_world).findings[0].law == law


@proves("V6")
@pytest.mark.gloo
def test_on_processes_a_kernel_that_leaves_a_gather_out_is_named(gloo_world: Worlds) -> None:
    (finding,) = outcome(
        "worked/tokens-100", wrong("gather_materialize", "skips_without_pages"), gloo_world
    ).findings
    assert finding.law == "V6"
    assert "kv.view" in finding.received


@proves("V1", "V6")
@pytest.mark.nccl
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("name", ["placement/scrambled-w2", "model/no-view-fp8", "formats/fp8-pages-of-64"])
def test_on_gpus_it_is_the_same(name: str) -> None:
    target = named(references.__name__)
    with World.nccl(2) as world:
        there = run_scenario(scenario(name), world, Setting(kernels=target))
    assert not there.findings
    assert (there.digest, there.uses) == (plain(name).digest, outcome(name, target).uses)


@pytest.mark.nccl
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("kernel", "law"), [("pages_in_rank_order", "V1"), ("own_pages_only", "V1")])
def test_on_gpus_a_wrong_kernel_breaks_a_law(kernel: str, law: str) -> None:
    setting = Setting(kernels=wrong("gather_materialize", kernel))
    with World.nccl(2) as world:
        assert run_scenario(scenario("placement/scrambled-w2"), world, setting).findings[0].law == law


# -- the block ---------------------------------------------------------------------------------------------


def test_within_the_block_only_this_thread_has_the_kernel_and_behind_it_nobody() -> None:
    before = ownership.to_physical
    slots, grid = torch.arange(8), Grid(2, 2)
    other: list[torch.Tensor] = []
    with in_place(wrong("logical_to_physical", "logical_slots_of_its_own")) as uses:
        assert ownership.to_physical is not before
        mine = ownership.to_physical(slots, 1, grid)
        thread = threading.Thread(target=lambda: other.append(ownership.to_physical(slots, 1, grid)))
        thread.start()
        thread.join()
        assert uses() == Uses({"logical_to_physical": 1})
    assert ownership.to_physical is before
    assert torch.equal(other[0], before(slots, 1, grid))
    assert not torch.equal(mine, other[0])


def test_the_functions_are_put_back_after_a_run_that_failed() -> None:
    before = ownership.to_physical
    assert outcome("worked/tokens-100", wrong("gather_materialize", "skips_without_pages")).findings
    assert ownership.to_physical is before


def test_what_ranks_compare_with_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    name, target = "incidents/split-02-last-token-lost", right("owner_mask")
    calls = outcome(name, target).uses.calls["owner_mask"]
    monkeypatch.setattr(standing, "_JUDGES", ())  # now a kernel has a say in what it is compared with
    assert outcome(name, target).uses.calls["owner_mask"] > calls


# -- within what is declared -------------------------------------------------------------------------------


def declared(op: str, function: Callable[..., object], **capabilities: object) -> Called:
    return Called(Candidate(OPS[op], function, Capabilities(**capabilities)))  # type: ignore[arg-type]


def to_physical(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
    return ownership.to_physical(slots, rank, Grid(world_size, page_size))


def mla_write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    assert cache.is_contiguous()
    cache[slots[slots >= 0].long()] = rows[slots >= 0]


def test_a_page_size_that_is_not_declared_is_left_to_the_reference() -> None:
    called = declared("logical_to_physical", to_physical, page_sizes=(64,))
    called.given((torch.arange(3), 0, 2, 64))
    with pytest.raises(Unsuited):
        called.given((torch.arange(3), 0, 2, 16))


def test_indices_come_in_a_type_that_is_declared() -> None:
    called = declared("logical_to_physical", to_physical, index_dtypes=("int32",))
    assert called.given((torch.arange(3), 0, 2, 4)).arguments["slots"].dtype == torch.int32


def test_numbers_come_in_a_declared_type_only_if_it_holds_them() -> None:
    called = declared("sparse_mla", OPS["sparse_mla"].reference, dtypes=(torch.bfloat16,))
    chosen = torch.zeros(1, 1, dtype=torch.int64)
    exact = torch.tensor([[[1.0, torch.nan]]])
    given = called.given((exact, exact[0], chosen, 1, 1.0)).arguments
    assert (given["q"].dtype, given["kv"].dtype) == (torch.bfloat16, torch.bfloat16)
    with pytest.raises(Unsuited):
        called.given((exact + 2**-20, exact[0], chosen, 1, 1.0))


def test_nan_does_not_come_to_a_kernel_that_says_so() -> None:
    called = declared("sparse_mla", OPS["sparse_mla"].reference, tail_nan=False)
    q = torch.ones(1, 1, 2)
    kv = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]])
    given = called.given((q, kv, torch.zeros(1, 1, dtype=torch.int64), 1, 1.0))
    assert bool(given.arguments["kv"].isfinite().all())


def test_what_is_written_to_a_contiguous_copy_comes_back() -> None:
    cache = torch.zeros(4, 6, dtype=torch.uint8)[:, ::2]
    rows = torch.arange(6, dtype=torch.uint8).view(2, 3)
    called = declared("mla_write", mla_write, contiguous=True)
    called.results(called.given((cache, torch.tensor([2, -1]), rows)))
    assert cache.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 2], [0, 0, 0]]


def test_a_device_that_is_not_here_is_left_to_the_reference() -> None:
    called = declared("logical_to_physical", to_physical, devices=("cuda",))
    if torch.cuda.is_available():
        given = called.given((torch.arange(3), 0, 2, 4))
        assert given.arguments["slots"].is_cuda
        assert called.results(given)[0].device.type == "cpu"
    else:
        with pytest.raises(Unsuited):
            called.given((torch.arange(3), 0, 2, 4))


def test_results_go_to_out_where_a_kernel_needs_it() -> None:
    def logical_to_physical(
        slots: torch.Tensor, rank: int, world_size: int, page_size: int, out: torch.Tensor
    ) -> None:
        out.copy_(to_physical(slots, rank, world_size, page_size))

    called = declared("logical_to_physical", logical_to_physical)
    (result,) = called.results(called.given((torch.tensor([453, 512]), 3, 4, 64)))
    assert result.tolist() == [69, -1]


def test_a_result_of_another_shape_is_named() -> None:
    called = declared("logical_to_physical", lambda *arguments: to_physical(*arguments)[1:])
    with pytest.raises(WrongResult, match=r"physical of logical_to_physical: expected torch.int64 \[3\]"):
        called.results(called.given((torch.arange(3), 0, 2, 4)))


# -- the command -------------------------------------------------------------------------------------------

KERNELS = """
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import to_physical
from refmodel.ops.declare import kernel


def logical_to_physical(slots, rank, world_size, page_size):
    return to_physical(slots, rank, Grid(world_size, page_size))


@kernel("tail_mask", page_sizes=(48,))
def my_mask(valid, page_size, num_slots):
    raise AssertionError("never called with pages of another size")
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    file = tmp_path / "my_kernels.py"
    file.write_text(KERNELS)
    return file


def test_the_gate_says_what_stood_where(target: Path, scenario: Callable[[str], Path]) -> None:
    report = target.parent / "gate.json"
    result = cpkv("gate", scenario(HOLDS), "--kernels", target, "--json", report)
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.startswith("  ")}
    assert re.search(r"in place, \d+ calls$", lines["logical_to_physical"])
    assert re.search(r"in place, never called; \d+ left to the reference$", lines["tail_mask"])
    assert lines["rerange"].endswith("the reference's")
    assert set(OPS) <= set(lines)
    assert '"op": "logical_to_physical"' in report.read_text()


def test_the_gate_fails_with_a_line_that_replays_it(tmp_path: Path) -> None:
    file = tmp_path / "wrong kernels.py"
    file.write_text("def logical_to_physical(slots, rank, world_size, page_size):\n    return slots\n")
    result = cpkv("gate", "worked/prefix-70-tokens-300", "--kernels", file)
    assert result.exit_code == 1
    (line,) = (line for line in result.output.splitlines() if line.strip().startswith("replay"))
    assert f"--kernels {shlex.quote(str(file))}" in line
    again = cpkv(*shlex.split(line)[2:])
    assert again.exit_code == 1


@pytest.mark.gloo
def test_a_file_is_found_by_processes_in_another_folder(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(target.parent)
    result = cpkv("gate", "worked/tokens-100", "--world", "gloo:4", "--kernels", target.name)
    assert result.exit_code == 0, result.output


def test_a_target_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "a file, a module or an entry point" in refused("gate", "--kernels", tmp_path / "nothing.py")


def test_a_trace_runs_with_kernels_too(target: Path) -> None:
    result = cpkv("gate", "--trace", "embedded", "--requests", 3, "--cp", 2, "--kernels", target)
    assert result.exit_code == 0, result.output
    assert re.search(r"logical_to_physical +in place, \d+ calls", result.output)


def test_an_operation_without_a_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.gate.kernels.SEAMS", {})
    uses = kernel_uses(right("rerange"), Uses())
    assert uses.ops[0].op == "rerange"
    assert uses.ops[0].words.startswith("alone only")


@proves("V1")
def test_the_fuzzer_finds_what_a_wrong_kernel_breaks() -> None:
    kernels = wrong("logical_to_physical", "logical_slots_of_its_own")
    tally = hunt(Campaign(seed=1, examples=20, kernels=kernels), threading.Event(), lambda tally: None)
    found = next(iter(tally.found.values()))
    assert found.finding.law in LAWS
    assert found.replay(Path("found")).endswith(f"--kernels {kernels.text}")


def test_the_command_of_the_fuzzer_takes_kernels(target: Path, tmp_path: Path) -> None:
    result = cpkv("fuzz", "--examples", 2, "--kernels", target, "--out", tmp_path / "found")
    assert result.exit_code == 0, result.output
    assert re.search(r"logical_to_physical +in place, [\d,]+ calls", result.output)
