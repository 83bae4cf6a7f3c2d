"""This rank's share of one run: the program in a thread of its own, and the verdict on the run of all."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from refmodel.collectives import Call
from sim.faults.fault import Fault
from sim.processes.messages import Issues
from sim.processes.rank import Seat, failed
from sim.surface.lines import line_of
from sim.torchrun.letters import Begins, Leaves, Verdict
from sim.torchrun.place import Place
from sim.torchrun.termination import Termination
from sim.torchrun.watcher import Watcher

Watch = Callable[[int, Call], None]

# For a program whose group is gone to notice.
_GRACE_SECONDS = 0.3


class Abandoned(BaseException):  # not an Exception: a program's own handlers must not catch it
    """Ends a program whose run has ended without it."""


class Share:
    """This rank's share of one run."""

    def __init__(self, run: int, rank: int, watcher: Watcher, watch: Watch | None) -> None:
        self.raised_by_watch: BaseException | None = None
        self._run = run
        self._rank = rank
        self._watcher = watcher
        self._watch = watch
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(
        self,
        sit: Callable[[], Seat],
        program: Callable[..., object],
        args: Sequence[Any],
        faults: Sequence[Fault],
        place: Place,
    ) -> None:
        module, name = getattr(program, "__module__", ""), getattr(program, "__qualname__", repr(program))
        label = f"{module}.{name} on {place.backend}"

        def body() -> None:
            try:
                if place.device is not None:
                    torch.cuda.set_device(place.device)  # of this thread
                seat = sit()
                seat.renew(self._heard)
                # Not earlier: who has begun may fail, and be left, and torch must not be making a group then.
                self._watcher.tell(self._run, Begins(label))
            except BaseException as raised:
                self._watcher.say(self._run, failed("start", raised))
                return
            self._watcher.say(self._run, seat.perform(program, args, faults))

        # daemon: if it is stuck, the process can still end.
        self._thread = threading.Thread(target=body, name=f"rank {self._rank}", daemon=True)
        self._watcher.begin(self._run, self._line)
        self._thread.start()

    def await_verdict(self, termination: Termination) -> Verdict:
        told = False
        while True:
            verdict = self._watcher.verdict(0.1)
            if verdict is not None:
                self._is_over = True
                return verdict
            if termination.asked and not told:
                told = True
                self._watcher.say(self._run, Leaves())
            termination.end_if_late()

    def give_up(self, raised: BaseException) -> None:
        """The main thread was interrupted; let the others know."""
        self._watcher.say(self._run, failed("", raised))
        self._watcher.verdict(1.0)
        self._is_over = True

    def end(self) -> None:
        """End the program, whose group is gone, wherever it is."""
        assert self._thread is not None
        self._thread.join(_GRACE_SECONDS)
        if self._thread.is_alive():
            # It computes on, or sleeps; in the first case this ends it.
            identity = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Abandoned))
            self._thread.join(_GRACE_SECONDS)
        if self._thread.is_alive():
            _stuck.append(self._thread)

    def _heard(self, call: Call) -> None:
        if self._is_over:
            raise Abandoned
        if self._watch is not None:
            try:
                self._watch(self._rank, call)
            except BaseException as raised:
                self.raised_by_watch = raised
                raise
        self._watcher.say(self._run, Issues(call))

    def _line(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread else None
        return "" if frame is None else line_of(frame)


_stuck: list[threading.Thread] = []


@atexit.register
def _end_certainly() -> None:
    """With a thread still stuck beneath Python, an interpreter that shuts down may hang, or abort."""
    if any(thread.is_alive() for thread in _stuck):
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)
