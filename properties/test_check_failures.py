"""What a failure says: a small case, code that shows it, a line that replays it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from properties.command_line import cpkv
from properties.kernel_files import RIGHT, WRONG, Write
from properties.kernel_trials import ALONE
from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from properties.kernels.handling import PLAIN, Handling, Views
from properties.kernels.paste import code_of
from properties.kernels.selection import size_of


def test_a_failure_is_small_and_its_code_and_replay_show_it(kernels: Write, tmp_path: Path) -> None:
    file, report = kernels(WRONG), tmp_path / "check.json"
    result = cpkv("check", file, "--json", report)
    assert result.exit_code == 1
    (verdict,) = json.loads(report.read_text())["verdicts"]
    failure = verdict["failure"]
    assert failure["kind"] == "O2"
    assert f"O2 broke: {failure['statement']}" in result.output
    assert failure["case"]["slots"] == 1
    assert failure["code"] in result.output
    printed = subprocess.run(
        [sys.executable, "-c", failure["code"]], capture_output=True, text=True, check=True
    ).stdout
    received, expected = printed.splitlines()
    assert failure["received"] in received
    assert failure["expected"] in expected
    assert f"  replay        {failure['replay']}" in result.output.splitlines()
    again = cpkv(*shlex.split(failure["replay"])[1:])
    assert again.exit_code == 1
    assert "O2 broke" in again.output


def test_a_replay_tries_every_way_of_handing_over(kernels: Write) -> None:
    file = kernels(RIGHT.replace("[0]", "[0].long()"))  # right for int64 alone
    result = cpkv("check", file)
    assert "handed over   int32 indices" in result.output
    (replay,) = re.findall(r"replay +(cpkv .*)", result.output)
    assert "dtype: " in cpkv(*shlex.split(replay)[1:]).output


@pytest.mark.parametrize("op", ALONE)
def test_the_code_of_any_case_runs(op: str) -> None:
    case = min(CASES[op].corners(), key=size_of)
    for way in (PLAIN, Handling(views=Views.STRIDED)):
        printed: list[tuple[object, ...]] = []
        code = code_of(case, way, "properties.kernels.references")
        exec(compile(code, op, "exec"), {"print": lambda *values, into=printed: into.append(values)})
        assert [values[0] for values in printed] == ["received", "expected"]


def test_a_replay_shows_what_the_kernel_prints(kernels: Write) -> None:
    file = kernels(RIGHT.replace("    return", "    print('rank', rank)\n    return"))
    case = '{"world":2,"page":4,"rank":1,"slots":3}'
    result = cpkv("check", file, "--op", "logical_to_physical", "--case", case)
    assert result.exit_code == 0
    assert "rank 1" in result.output


@pytest.mark.parametrize("kind", list(CASES.values()), ids=lambda kind: kind.op.name)
def test_a_case_is_small_before_it_is_large(kind: type[Case]) -> None:
    sizes = [size_of(case)[0] for case in kind.corners()]
    assert min(sizes) == min(sizes[:3])
