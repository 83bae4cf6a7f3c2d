"""The life of a worker process, and what it says to its parent.

It tells of each collective *before* it issues it, so that its position is known also when it can no longer
say it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from refmodel.collectives import Call, Ledger, recording
from sim.failures import traceback_text
from sim.processes.parcel import pack, unpack

# The parent keeps the time limit of a run; that of gloo must not come first.
_GLOO_PATIENCE = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Issues:
    call: Call


@dataclass(frozen=True, slots=True)
class Returned:
    result: bytes  # packed


@dataclass(frozen=True, slots=True)
class Failed:
    problem: str  # what cannot be done: "program", "result"; empty if the program raised
    received: str
    traceback: str
    when: float  # of the machine's monotonic clock, which all processes share


Message = Ready | Issues | Returned | Failed


def serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    """The life of a worker: meet the others in ``folder``, then run what comes through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and decides
    _end_with_parent(folder)
    torch.set_num_threads(1)
    # All ranks are on this machine; its host name may not lead to it.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=size,
        timeout=_GLOO_PATIENCE,
    )
    group = dist.group.WORLD
    assert group is not None
    _say(pipe, Ready())
    with suppress(EOFError):
        while True:
            _say(pipe, _perform(pipe.recv_bytes(), group, pipe))


def _perform(case: bytes, group: dist.ProcessGroup, pipe: Connection) -> Message:
    try:
        path, payload = unpack(case)
        sys.path[:] = path
        program, args = unpack(payload)
    except BaseException as raised:
        return _failed("program and arguments", raised)
    try:
        with recording(Ledger(listener=lambda call: _say(pipe, Issues(call)))):
            result = program(group, *args)
    except BaseException as raised:
        return _failed("", raised)
    try:
        return Returned(pack(result))
    except Exception as raised:
        return _failed("result", raised)


def _failed(problem: str, raised: BaseException) -> Failed:
    received = f"{type(raised).__name__}: {raised}"
    return Failed(problem, received, traceback_text(raised, skip=__name__), time.monotonic())


def _say(pipe: Connection, message: Message) -> None:
    pipe.send_bytes(pack(message))


def _end_with_parent(folder: str) -> None:
    """A worker deep in a collective would not notice that nobody waits for it, nor who cleans up."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
