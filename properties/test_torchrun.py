"""The world that was started: all ranks get the results of all, and all raise the same failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refmodel.errors import InvalidInput
from sim.failures import InfrastructureFailed, RankFailed, TimedOut, WorldUnavailable
from sim.machine import available
from sim.processes.messages import Alive, Failed, Returned
from sim.torchrun import judge as judging
from sim.torchrun.judge import Judge
from sim.torchrun.letters import Begins, Done, Leaves, Read
from sim.torchrun.place import find_place, interface_towards
from sim.world import World

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
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
    assert (report["rank"], report["failure"]) == (1 - culprit, "RankFailed")
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


# How rank 0 judges, without processes.


class Clock:
    """Time that passes when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(judging, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Court:
    """A judge of three ranks, all of which have begun."""

    def __init__(self, clock: Clock, begun: int = 3) -> None:
        self.heard: dict[int, float] = {}
        self.clock = clock
        self.judge = Judge("torchrun:3", 3, timeout=10, heard=self.heard)
        for rank in range(begun):
            self.say(rank, Begins("p"))

    def say(self, rank: int, message: Any) -> None:
        self.heard[rank] = self.clock.now
        self.judge.hear(rank, message)

    def wait(self, seconds: float, *alive: int) -> Any:
        """The verdict after that time, in which only these ranks were heard."""
        for _ in range(round(seconds * 10)):
            self.clock.now += 0.1
            for rank in alive:
                self.say(rank, Alive("ring.py:88"))
            verdict = self.judge.verdict()
            if verdict is not None:
                return verdict
        return None


LOST = Failed("", "RuntimeError: Connection closed by peer", "", 0.0, lost_connection=True)


def test_a_silent_rank_is_lost_soon_if_others_miss_it(clock: Clock) -> None:
    court = Court(clock)
    assert court.wait(4, 0, 1) is None
    court.say(0, LOST)
    verdict = court.wait(0.5, 0, 1)
    assert isinstance(verdict, RankFailed)
    assert verdict.rank == 2


def test_a_silent_rank_is_lost_in_the_end(clock: Clock) -> None:
    court = Court(clock)
    verdict = court.wait(6, 0, 1)
    assert isinstance(verdict, RankFailed)
    assert "not heard of for" in str(verdict)


def test_a_launcher_that_ends_ranks_knows_of_a_death(clock: Clock) -> None:
    court = Court(clock)
    court.say(0, Leaves())
    verdict = court.wait(2, 0, 1)
    assert isinstance(verdict, RankFailed)
    assert verdict.rank == 2


def test_connections_that_break_between_living_ranks_are_the_networks(clock: Clock) -> None:
    court = Court(clock)
    court.say(1, LOST)
    verdict = court.wait(6, 0, 1, 2)
    assert isinstance(verdict, InfrastructureFailed)


def test_a_rank_that_was_lost_before_it_began_is_no_fault_of_the_program(clock: Clock) -> None:
    court = Court(clock, begun=2)
    court.heard[2] = clock.now  # in an earlier run
    verdict = court.wait(6, 0, 1)
    assert isinstance(verdict, InfrastructureFailed)
    assert verdict.rank == 2


def test_a_rank_that_never_comes_is_waited_for_and_then_named(clock: Clock) -> None:
    court = Court(clock, begun=2)
    assert court.wait(judging.START_SECONDS - 1, 0, 1) is None
    verdict = court.wait(2, 0, 1)
    assert isinstance(verdict, TimedOut)
    assert "nothing from rank 2" in str(verdict)


def test_time_counts_from_when_the_last_rank_begins(clock: Clock) -> None:
    court = Court(clock, begun=2)
    assert court.wait(9, 0, 1) is None
    court.say(2, Begins("p"))
    assert court.wait(9, 0, 1, 2) is None
    assert isinstance(court.wait(2, 0, 1, 2), TimedOut)


def test_a_verdict_is_done_when_all_have_returned(clock: Clock) -> None:
    court = Court(clock)
    for rank in range(3):
        assert court.judge.verdict() is None
        court.say(rank, Returned(b"", ()))
    assert court.judge.verdict() == Done([b""] * 3, [[], [], []], [()] * 3)
    for rank in range(3):
        assert not court.judge.is_known_to_all()
        court.say(rank, Read())
    assert court.judge.is_known_to_all()


# Input.


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    values = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (values | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_process_that_nobody_started_has_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(WorldUnavailable, match="RANK"):
        World.started()
    assert not {entry.kind: entry for entry in available()}["torchrun"].available


def test_the_world_that_was_started_has_its_size(environment: pytest.MonkeyPatch) -> None:
    assert str(World.parse("torchrun")) == str(World.parse("torchrun:4")) == "torchrun:4"
    assert {entry.kind: entry for entry in available()}["torchrun"].largest == 4
    with pytest.raises(InvalidInput, match="ranks of torchrun: expected 4, as were started, got 2"):
        World.parse("torchrun:2")


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "4"), ("RANK", "-1"), ("RANK", "x"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "²")],
)
def test_an_environment_that_makes_no_sense_is_refused(
    environment: pytest.MonkeyPatch, name: str, value: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(InvalidInput, match=f"environment variable {name}"):
        World.started(backend="gloo")


def test_backends_that_are_not_there_are_refused(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="backend"):
        World.started(backend="mpi")
    with pytest.raises(InvalidInput, match="timeout"):
        World.started(timeout=0)
    environment.setenv("LOCAL_WORLD_SIZE", "1000")
    assert find_place(None).backend == "gloo"
    with pytest.raises(WorldUnavailable, match="1000 GPUs on this machine"):
        World.started(backend="nccl")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") is None
