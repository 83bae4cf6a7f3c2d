"""A right kernel at any seam changes nothing; a fault there breaks a law."""

from __future__ import annotations

import pytest

from properties.kernels import references
from properties.kernels_in_place import WRONG, outcome, plain, right, wrong
from properties.proofs import proves
from refmodel.laws import LAWS
from refmodel.ops.catalogue import OPS
from sim.gate.histories import REFUSAL
from sim.kernels import in_place as standing
from sim.kernels.loading import named
from sim.kernels.seams.catalogue import SEAMS
from sim.kernels.seams.seam import Seam

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

ALL = [seam for seams in SEAMS.values() for seam in seams]


def place_of(seam: Seam) -> str:
    return CHOICE.get(seam.op) or WHERE[seam.place]


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
