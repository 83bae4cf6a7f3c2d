"""The command ``cpkv check``: its report, its exit code, the options it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from properties.command_line import cpkv, refused
from properties.kernel_files import RIGHT, Write


def test_a_right_target_holds_with_exit_code_0(tmp_path: Path) -> None:
    report = tmp_path / "check.json"
    ops = ("--op", "rerange", "--op", "lse_merge")
    result = cpkv("check", "properties.kernels.references", *ops, "--examples", 5, "--json", report)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("check held: 2 pass; ")
    found = json.loads(report.read_text())
    assert (found["schema"], found["target"], found["exit_code"]) == (1, "properties.kernels.references", 0)
    assert {one["op"]: one["verdict"] for one in found["verdicts"]} == {
        "rerange": "pass",
        "lse_merge": "pass",
    }
    assert all(one["cases"] and one["attempts"] for one in found["verdicts"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--op", "rerang"], "Did you mean rerange"),
        (["--op", "rerange"], "logical_to_physical"),
        (["--device", "tpu"], "--device"),
        (["--world", "mpi:2"], "mpi"),
        (["--case", "{}"], "--op NAME"),
        (["--op", "logical_to_physical", "--case", "{}"], "world"),
        (["--op", "logical_to_physical", "--case", '{"world": 1'], "--case"),
        (["--op", "logical_to_physical", "--case", '{"wrld": 1}'], "--case"),
        (["--json", "no/such/folder/check.json"], "--json"),
        (["--known", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense_are_refused(kernels: Write, options: list[str], said: str) -> None:
    output = refused("check", kernels(RIGHT), *options)
    assert said in output
    assert "Traceback" not in output
