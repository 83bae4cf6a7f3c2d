"""What failed is kept where other machines find it: in a folder, or on a Redis server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakeredis import TcpFakeServer

from properties.command_line import refused
from properties.examples_kept import examples_at
from properties.fuzz import Batch, run_batch
from properties.mutants import named_mutant
from refmodel.errors import InvalidInput


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of a Redis server that lives as long as the test."""
    served = TcpFakeServer(("127.0.0.1", 0))
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"redis://127.0.0.1:{served.server_address[1]}/0"
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize("shared", ["folder", "server"])
def test_one_machine_finds_at_once_what_another_found(shared: str, server: str, tmp_path: Path) -> None:
    place = server if shared == "server" else str(tmp_path / "examples")
    with named_mutant("pd-03").in_place():
        assert run_batch(Batch(seed=0, examples=200, database=place, first=True), threading.Event()).found
        alone = run_batch(Batch(seed=5, examples=5), threading.Event())
        helped = run_batch(Batch(seed=5, examples=5, database=place, first=True), threading.Event())
    assert not alone.found
    assert helped.found


def test_keys_come_back_from_a_server(server: str) -> None:
    examples_at(server).save(b"test", b"example")
    assert list(examples_at(server).fetch(b"test")) == [b"example"]


def test_a_server_that_is_not_there_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Redis server"):
        examples_at("redis://127.0.0.1:1/0")
    said = refused(
        "fuzz", "--examples", 5, "--database", "redis://127.0.0.1:1/0", "--out", tmp_path / "found"
    )
    assert "--database: expected a Redis server" in said
    assert not (tmp_path / "found").exists()
