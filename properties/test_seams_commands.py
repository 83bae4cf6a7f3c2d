"""``--kernels`` of the gate and of the fuzzer: what stood where, and how a failure replays."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from properties.command_line import HOLDS, cpkv, refused
from properties.fuzz import Campaign, hunt
from properties.kernels_in_place import right, wrong
from properties.proofs import proves
from refmodel.laws import LAWS
from refmodel.ops.catalogue import OPS
from sim.gate.kernels import kernel_uses
from sim.kernels.uses import Uses

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
