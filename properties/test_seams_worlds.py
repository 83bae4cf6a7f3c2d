"""Kernels in place are the same in every world: on processes, on GPUs."""

from __future__ import annotations

import pytest

from properties.gpu_marks import needs_gpus
from properties.kernels import references
from properties.kernels_in_place import WRONG, Worlds, outcome, plain, scenario, wrong
from properties.proofs import proves
from sim.gate.runs import run_scenario
from sim.gate.setting import Setting
from sim.kernels.loading import named
from sim.world import World


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
@needs_gpus(2)
@pytest.mark.parametrize("name", ["placement/scrambled-w2", "model/no-view-fp8", "formats/fp8-pages-of-64"])
def test_on_gpus_it_is_the_same(name: str) -> None:
    target = named(references.__name__)
    with World.nccl(2) as world:
        there = run_scenario(scenario(name), world, Setting(kernels=target))
    assert not there.findings
    assert (there.digest, there.uses) == (plain(name).digest, outcome(name, target).uses)


@pytest.mark.nccl
@needs_gpus(2)
@pytest.mark.parametrize(("kernel", "law"), [("pages_in_rank_order", "V1"), ("own_pages_only", "V1")])
def test_on_gpus_a_wrong_kernel_breaks_a_law(kernel: str, law: str) -> None:
    setting = Setting(kernels=wrong("gather_materialize", kernel))
    with World.nccl(2) as world:
        assert run_scenario(scenario("placement/scrambled-w2"), world, setting).findings[0].law == law
