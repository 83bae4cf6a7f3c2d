"""What a launcher says of the world that it started is used, or refused."""

from __future__ import annotations

import sys

import pytest

from refmodel.errors import InvalidInput
from sim.failures import WorldUnavailable
from sim.machine import available
from sim.torchrun.place import find_place, interface_towards
from sim.world import World


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
