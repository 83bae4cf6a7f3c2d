"""The thread that speaks and listens while its rank computes, or waits for ever in a collective."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from refmodel.errors import Where
from sim.failures import InfrastructureFailed, RankFailed, RunFailed, traceback_text
from sim.processes.messages import Alive, Failed
from sim.processes.parcel import pack, unpack
from sim.torchrun.judge import LOST_SECONDS, MISSED_SECONDS, Judge
from sim.torchrun.letters import Leaves, Read, Verdict
from sim.torchrun.post import Post

_TICK_SECONDS = 0.02
_BEAT_SECONDS = 0.5
# For all ranks to learn of a verdict before rank 0 goes its way, perhaps with the store.
_FAREWELL_SECONDS = 1.0


class Watcher:
    """Publishes what this rank does, and learns how each run ends; on rank 0 it decides that, too."""

    def __init__(self, post: Post, rank: int, size: int, world: str, timeout: float) -> None:
        self._post = post
        # torchrun keeps the store; where another launcher is, rank 0 does.
        self._rank_0_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._rank = rank
        self._size = size
        self._world = world
        self._timeout = timeout
        self._outbox: list[tuple[int, Any]] = []
        self._said = self._sent = 0  # messages
        self._wakeup = threading.Condition()
        self._closing = False
        self._run = 0
        self._where: Callable[[], str] = str
        self._troubled = False
        self._verdict: Verdict | None = None
        self._end: RunFailed | None = None  # of this thread, and with it of all further runs
        self._decided = threading.Event()
        self._next_beat = 0.0
        self._judges: dict[int, Judge] = {}  # of rank 0, by run
        self._heard: dict[int, float] = {}
        self._beats = 0  # of rank 0, and since when there was none
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="cpkv watcher", daemon=True)
        self._thread.start()

    def begin(self, run: int, where: Callable[[], str]) -> None:
        """Run number ``run`` begins here; ``where()`` says at which line the program is."""
        self._decided.clear()
        self._verdict, self._troubled = None, False
        self._where, self._run = where, run
        if self._end is not None:
            self._decide(self._end)

    def say(self, run: int, message: Any) -> None:
        """Let rank 0 know, soon."""
        with self._wakeup:
            self._troubled = self._troubled or isinstance(message, Leaves | Failed)
            self._outbox.append((run, message))
            self._said += 1
            self._wakeup.notify_all()

    def tell(self, run: int, message: Any) -> None:
        """As :meth:`say`, and it is on its way when this returns: what comes next may end the process."""
        self.say(run, message)
        with self._wakeup:
            said = self._said
            self._wakeup.wait_for(lambda: self._sent >= said, LOST_SECONDS)

    def verdict(self, seconds: float) -> Verdict | None:
        """How the run ended; None if that is not known ``seconds`` from now."""
        self._decided.wait(seconds)
        return self._verdict

    def close(self) -> None:
        """Say what is left to say, and end."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._thread.join(_FAREWELL_SECONDS + LOST_SECONDS)

    def await_farewell(self) -> None:
        """On rank 0: let all others learn of the verdict."""
        until = time.monotonic() + _FAREWELL_SECONDS
        while self._rank == 0 and self._thread.is_alive() and time.monotonic() < until:
            judge = self._judges.get(self._run)
            if judge is not None and judge.is_known_to_all():
                return
            time.sleep(_TICK_SECONDS)

    def _watch(self) -> None:
        try:
            while not self._closing or self._outbox:
                with self._wakeup:
                    self._wakeup.wait_for(lambda: self._outbox or self._closing, _TICK_SECONDS)
                self._tick(time.monotonic())
        except RuntimeError as raised:  # as all errors of a store are
            self._end = self._store_is_gone(raised)
            self._decide(self._end)
        except BaseException as raised:
            # Ours to blame; but a rank that waits for a verdict must get one.
            self._end = self._broken(raised)
            self._decide(self._end)

    def _tick(self, now: float) -> None:
        with self._wakeup:
            letter, self._outbox = self._outbox, []
            said = self._said
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            letter.append((self._run, Alive(self._where())))
            if self._rank == 0:
                self._post.beat()
        if letter:
            self._post.send(pack(letter))
            with self._wakeup:
                self._sent = said
                self._wakeup.notify_all()
        if self._rank == 0:
            self._judge()
        if self._run and self._verdict is None:
            verdict = self._post.announced(f"verdict/{self._run}")
            if verdict is not None:
                # Before the rank hears of it, and perhaps ends.
                self._post.send(pack([(self._run, Read())]))
                self._decide(unpack(verdict))
            elif self._rank != 0:
                self._look_after_judge(now)

    def _judge(self) -> None:
        for sender, letter in self._post.receive():
            self._heard[sender] = time.monotonic()
            for run, message in unpack(letter):
                if run not in self._judges and run > 0 and run > max(self._judges, default=0):
                    self._judges[run] = Judge(self._world, self._size, self._timeout, self._heard)
                if run in self._judges:
                    self._judges[run].hear(sender, message)
        for run, judge in list(self._judges.items()):
            if not judge.is_closed:
                verdict = judge.verdict()
                if verdict is not None:
                    judge.is_closed = True
                    self._post.announce(f"verdict/{run}", pack(verdict))
            elif any(later > run and self._judges[later].has_all() for later in self._judges):
                self._post.withdraw(f"verdict/{run}")
                del self._judges[run]

    def _look_after_judge(self, now: float) -> None:
        """Rank 0 looks after all; all look after rank 0."""
        beats = self._post.beats()
        if beats != self._beats:
            self._beats, self._last_beat = beats, now
        silent = now - self._last_beat
        if silent > (MISSED_SECONDS if self._troubled else LOST_SECONDS):
            self._decide(self._judge_is_gone(f"not heard of for {silent:.1f} s"))

    def _decide(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._decided.set()

    def _judge_is_gone(self, cause: str) -> RunFailed:
        return RankFailed(
            f"rank 0 of {self._world} is gone",
            expected="a rank that says twice a second that it is there",
            received=cause,
            where=Where(rank=0),
            fix="What the other ranks did was known to rank 0 alone.",
        )

    def _store_is_gone(self, raised: RuntimeError) -> RunFailed:
        silent = time.monotonic() - self._last_beat
        if self._rank != 0 and self._rank_0_has_store:
            return self._judge_is_gone("its process is gone, and with it the store where all met")
        if self._rank != 0 and silent > 2 * _BEAT_SECONDS:
            return self._judge_is_gone(f"not heard of for {silent:.1f} s, nor the store where all met")
        return InfrastructureFailed(
            f"{self._world} has lost the store where all ranks met",
            expected="a store that lives as long as the ranks",
            received=f"{type(raised).__name__}: {raised}".splitlines()[0],
            fix="It lives with torchrun on the first node.",
        )

    def _broken(self, raised: BaseException) -> RunFailed:
        return InfrastructureFailed(
            f"the watcher of rank {self._rank} of {self._world} broke",
            expected="no exception",
            received=traceback_text(raised, skip=__name__),
            where=Where(rank=self._rank),
        )
