"""The life of a worker process, and what it says to its parent.

It tells of each call *before* it issues it, so that its position is known also when it can no longer say it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from sim.garbage import collect_seldom
from sim.processes import relay
from sim.processes.messages import Begins, Issues, Loaded, Message, Ready
from sim.processes.parcel import pack, unpack
from sim.processes.rank import Seat, failed
from sim.processes.words import keep_words
from sim.surface.recorder import Recorder

# The parent keeps the time limit of a run; that of torch must not come first.
_PATIENCE = timedelta(days=1)
# Asks a worker to write down where it is.
STACK_SIGNAL = signal.SIGUSR1


def serve(kind: str, rank: int, size: int, folder: str, pipe: Connection) -> None:
    """The life of a worker: meet the others in ``folder``, then run what comes through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and decides
    _end_with_parent(folder)
    keep_words(folder, rank)
    torch.set_num_threads(1)
    collect_seldom()
    recorder = Recorder(time.monotonic_ns)
    try:
        faulthandler.register(STACK_SIGNAL, stack_file(folder, rank).open("w"), all_threads=True)
        seat = Seat(_meet(kind, rank, size, folder, recorder), recorder)
    except BaseException as raised:
        _say(pipe, failed("start", raised))
        return
    _say(pipe, Ready())
    with suppress(EOFError):
        while True:
            _say(pipe, _perform(pipe.recv_bytes(), seat, pipe))


def _perform(case: bytes, seat: Seat, pipe: Connection) -> Message:
    path, payload = unpack(case)
    seat.renew(lambda call: _say(pipe, Issues(call)))
    _say(pipe, Begins())
    try:
        sys.path[:] = path
        program, args, faults = unpack(payload)
    except BaseException as raised:
        return failed("program and arguments", raised)
    _say(pipe, Loaded())
    return seat.perform(program, args, faults)


def stack_file(folder: str, rank: int) -> Path:
    """Where a worker that gets ``STACK_SIGNAL`` writes its stack."""
    return Path(folder) / f"stack.{rank}"


def _meet(kind: str, rank: int, size: int, folder: str, recorder: Recorder) -> dist.ProcessGroup:
    device = None
    if kind == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    elif sys.platform == "linux":
        # All ranks are on this machine; its host name may not lead to it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    relay.register(kind, recorder, device)
    dist.init_process_group(
        relay.backend_name(kind),
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=size,
        timeout=_PATIENCE,
        device_id=device,
    )
    group = dist.group.WORLD
    assert group is not None
    return group


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
