"""Each kernel is tried in a process of its own: one that crashes or hangs is a finding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from properties.command_line import cpkv
from properties.kernel_files import RIGHT, Write
from properties.kernel_trials import CHEATS, DEADLY, named, verdict_of
from properties.kernels.adversaries import cheats
from properties.kernels.adversaries.adversary import Adversary


@pytest.mark.parametrize("cheat", [one for one in CHEATS if one.kind in DEADLY], ids=named)
def test_a_crash_and_a_hang_are_findings(cheat: Adversary) -> None:
    verdict = verdict_of(f"{cheats.__name__}:{cheat.name}", cheat.op, limit=1.5)
    assert verdict.failure is not None
    assert verdict.failure.kind == cheat.kind
    assert verdict.failure.steady
    if cheat.name == "segfaults":
        assert 100 < verdict.failure.case["slots"] < 200  # 5,000 in the corner that crashes first
        assert "SIGSEGV" in verdict.failure.received
        assert "in segfaults" in verdict.failure.received
    if cheat.name == "hangs":
        assert verdict.failure.case["slots"] == 1
        assert "in hangs" in verdict.failure.received


def test_one_that_dies_leaves_the_others(kernels: Write, tmp_path: Path) -> None:
    file = kernels(
        RIGHT
        + """
import os

def rerange(buffers, prefixes, tokens, world_size, page_size):
    print("so far so good", flush=True)
    os.abort()

def owner_mask(slots, rank, world_size, page_size):
    while True:
        pass
"""
    )
    report = tmp_path / "check.json"
    result = cpkv("check", file, "--limit", 1, "--examples", 5, "--json", report)
    assert result.exit_code == 1
    found = {one["op"]: one for one in json.loads(report.read_text())["verdicts"]}
    assert found["logical_to_physical"]["verdict"] == "pass"
    assert found["rerange"]["failure"]["kind"] == "crash"
    assert "SIGABRT" in found["rerange"]["failure"]["received"]
    assert "so far so good" in found["rerange"]["failure"]["received"]
    assert found["owner_mask"]["failure"]["kind"] == "hang"
