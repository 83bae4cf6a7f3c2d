"""The world that was started: all ranks get the results of all, and all raise the same failure."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

Reports = list[dict[str, Any]]


def start(size: int, timeout: float, *cases: str) -> tuple[int, Reports]:
    """The exit code of torchrun, and the reports of all ranks in rank order of each case."""
    command = [*LAUNCHER, f"--nproc-per-node={size}", "-m", "properties.started_case", f"{timeout}", *cases]
    # In a session of its own, which ends with it, whatever happens.
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=120)
        finally:
            with_group = os.getpgid(process.pid) if process.poll() is None else None
            if with_group is not None:
                os.killpg(with_group, signal.SIGKILL)
    reports = [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]
    assert reports, output
    return process.returncode, sorted(
        reports, key=lambda report: (cases.index(report["case"]), report["rank"])
    )


@pytest.mark.gloo
def test_every_rank_gets_the_results_of_all() -> None:
    code, reports = start(2, 20, "who", "raw_calls", "group_name")
    assert code == 0
    assert [report["results"] for report in reports] == [
        *[[[0, 2], [1, 2]]] * 2,
        *[[[1.0, 1.0], [1.0, 1.0]]] * 2,
        *[["1", "1"]] * 2,
    ]
    first, second = reports[2]["calls"]
    assert first[:3] == ["all_reduce", "broadcast", "send"]
    assert second[:3] == ["all_reduce", "broadcast", "recv"]
    assert reports[2]["calls"] == reports[3]["calls"]
    assert reports[2]["spans"] == [len(first), len(second)]


# Each on a world of two ranks: the case, its failure on every rank, and what it says.
FAILURES = {
    "diverges": ("Diverged", "rank 0 issues other"),
    "raises,1": ("RankFailed", "ZeroDivisionError: of my own making"),
    "raises,0": ("RankFailed", "rank 0 of torchrun:2 failed"),
    "computes_on,1": ("TimedOut", "rank 0 waits in #1 after: "),
    "sleeps,0": ("TimedOut", "rank 0 has not come to it, its last call is #0 before"),
    "skips_a_group": ("TimedOut", "now at process_programs.py:"),
    "returns_a_lock": ("InvalidInput", "result between processes"),
    "dies_after@0": ("InvalidInput", "properties.process_programs.who on "),
}


@pytest.mark.gloo
def test_all_ranks_raise_the_same_failure_and_go_on() -> None:
    code, reports = start(2, 2, *FAILURES, "who")
    assert code == 1
    assert [report.get("results") for report in reports[-2:]] == [[[0, 2], [1, 2]]] * 2, reports[-2:]
    for case, (kind, text) in FAILURES.items():
        ours = [report for report in reports if report["case"] == case]
        assert [report["rank"] for report in ours] == [0, 1]
        assert [report["failure"] for report in ours] == [kind, kind]
        assert text in ours[0]["text"]
        assert ours[0]["text"] == ours[1]["text"]
        assert all(report["seconds"] < 5 for report in ours)


@pytest.mark.gloo
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_dies_is_named_by_the_others(culprit: int) -> None:
    code, reports = start(2, 20, f"dies,{culprit},SIGKILL")
    assert code == 1
    (report,) = reports
    assert (report["rank"], report["failure"]) == (1 - culprit, "RankFailed"), report["text"]
    assert f"rank {culprit}" in report["text"].partition("\n")[0]
    assert "not heard of for" in report["text"]
    assert report["seconds"] < 5


@pytest.mark.gloo
def test_any_launcher_will_do() -> None:
    """Without torchrun, and where rank 0 takes the store with it when it dies."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "properties.started_case", "20", "who", "dies,0,SIGKILL"]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | place | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 1]
    first, second = (json.loads(line) for line in outputs[1].splitlines())
    assert first["results"] == [[0, 2], [1, 2]]
    assert second["failure"] == "RankFailed"
    assert "rank 0 of torchrun:2 is gone" in second["text"]
