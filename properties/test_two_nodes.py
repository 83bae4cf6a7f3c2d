"""Two nodes, of network namespaces on one machine, are one world."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


EXAMPLES = ROOT / "examples"


def _why_no_namespaces() -> str:
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "needs iproute2 and unshare"
    if os.geteuid() != 0:
        return "needs root"
    name = f"cpkv-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"ip netns: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return "" if (EXAMPLES / "two_nodes.sh").exists() else "the examples are not part of the package"


why_no_namespaces = cache(_why_no_namespaces)


def two_nodes(*arguments: str) -> tuple[int, str]:
    if why_no_namespaces():
        pytest.skip(why_no_namespaces())
    with subprocess.Popen(
        [EXAMPLES / "two_nodes.sh", *arguments],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=120)
        except BaseException:
            process.terminate()  # it cleans up
            raise
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"-{process.pid}" not in left
    return process.returncode, output


@pytest.mark.gloo
@pytest.mark.slow
def test_two_nodes_are_one_world() -> None:
    code, output = two_nodes()
    assert code == 0
    for rank in range(4):
        assert f"rank {rank} of torchrun:4: 4 results, {{240.0}} on node0, node1; 3 calls" in output


@pytest.mark.gloo
@pytest.mark.slow
def test_both_nodes_name_what_went_wrong_on_one() -> None:
    code, output = two_nodes("--break", "skip")
    assert code == 1
    named = [line for line in output.splitlines() if "Diverged: the ranks of torchrun:4 diverge" in line]
    assert sorted(line.partition(" after")[0] for line in named) == [f"rank {rank}" for rank in range(4)]
    assert all("rank 3" in line for line in named)
