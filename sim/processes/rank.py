"""One rank's share of a run, in whatever process it lives."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from sim.failures import traceback_text
from sim.faults.fault import Fault, disturber, suffered
from sim.processes.messages import Failed, Returned
from sim.processes.parcel import pack
from sim.surface.group import outsiders_refused
from sim.surface.recorder import Listener, Recorder

# What calls a program.
_CALLERS = (__name__, "sim.faults.fault", "sim.processes.worker", "sim.torchrun.share", "contextlib")
# Long enough for all other ranks to come to a call and wait.
_LINGER_SECONDS = 0.2
# Of gloo, NCCL and their sockets, when the rank at the other end is gone.
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|ncclRemoteError|"
    r"socket .*(closed|timeout)|connectFullMesh failed",
    re.IGNORECASE,
)


class Seat:
    """This process as a rank of ``group``, for one program after the other."""

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        self.group = group
        self._recorder = recorder
        self._backend, self._store = c10d._world.pg_map[group]
        self._runs = 0

    def renew(self, listener: Listener) -> None:
        """As on the first day: what an earlier program left behind must not show in the next.

        Call it on all ranks between two programs, when all have returned from the first.
        """
        for left in [group for group in c10d._world.pg_map if group is not self.group]:
            dist.destroy_process_group(left)
        # Groups are numbered from 1 in each program, as on lockstep, but must not meet in the store what
        # those of the same number once left there.
        self._runs += 1
        c10d._world.pg_map[self.group] = (self._backend, PrefixStore(f"run{self._runs}", self._store))
        c10d._world.group_count = 1
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        self._recorder.renew(listener)

    def perform(
        self, program: Callable[..., object], args: Sequence[Any], faults: Sequence[Fault]
    ) -> Returned | Failed:
        """Run the program."""
        disturbs = disturber(faults, self.group.rank(), _Process())
        self._recorder.disturb = disturbs
        try:
            with outsiders_refused():
                result = suffered(disturbs, program, self.group, *args)
            if self.group.bound_device_id is not None:
                # What a GPU has not finished has not succeeded.
                torch.cuda.synchronize(self.group.bound_device_id)
        except BaseException as raised:
            return failed("", raised)
        try:
            parcel = pack(result)
        except Exception as raised:
            return failed("result", raised)
        return Returned(parcel, self._recorder.times(), serves_on=dist.group.WORLD is self.group)


class _Process:
    """How a rank that has a process of its own suffers."""

    def die(self, fault: Fault) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def hang(self, fault: Fault) -> NoReturn:
        while True:
            time.sleep(3600)

    def linger(self) -> None:
        time.sleep(_LINGER_SECONDS)


def failed(problem: str, raised: BaseException) -> Failed:
    """The message that says so."""
    return Failed(
        problem,
        f"{type(raised).__name__}: {raised}",
        traceback_text(raised, skip=_CALLERS),
        time.monotonic(),
        _lost_connection(raised),
    )


def _lost_connection(raised: BaseException) -> bool:
    """Whether a collective failed because a rank at the other end is gone.

    A program has connections of its own; an error of theirs is not raised out of torch.
    """
    if not isinstance(raised, RuntimeError) or not _LOST.search(str(raised)):
        return False
    innermost = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)][-1]
    module: str = innermost.f_globals.get("__name__", "")
    return module.startswith(("torch.distributed", "sim.surface.group", "sim.surface.work", "sim.processes"))
