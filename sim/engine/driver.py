"""Who goes next when a trace is served: steps one by one, chosen from what all ranks know.

A few requests run at a time. In each round all that wait for prefill go forward by a chunk, as far as caps
admit, and all that are ready decode one token or finish. Where a lane has no page left that locks do not
keep, the round goes on without it: others finish, or the youngest is sent back to the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from sim.cases.service import Service
from sim.engine.request import Phase
from sim.engine.tables import Tables
from sim.histories.history import Evict, Step

Steps = Generator[Step, bool, None]  # is sent whether the step was done, or there were no pages for it


@dataclass(slots=True)
class Driver:
    """The queue of a service and what is running. :meth:`steps` is the one thing that changes it."""

    service: Service
    tables: Tables  # as they are after each step; never changed here
    waiting: deque[int] = field(init=False)  # numbers of requests, from 0
    running: dict[str, int] = field(init=False, default_factory=dict)  # name → number, the oldest first
    decodes: dict[str, int] = field(init=False, default_factory=dict)  # still to do
    returned: int = 0  # requests sent back to the queue so far
    dropped: int = 0  # requests given up: alone, and still without pages
    crowded: bool = False  # nobody is let in until somebody leaves

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.service.requests)))

    def steps(self) -> Steps:
        """All steps; at the end everything is evicted, so that what is left locked shows."""
        while self.waiting or self.running:
            yield from self._submit()
            yield from self._forward()
            yield from self._decode()
            yield from self._finish()
        for lane in range(self.service.setting.world_size):
            yield Step(evict=Evict(lane, self.service.setting.pages_per_lane))

    def _in(self, phase: Phase) -> list[str]:
        return [name for name in self.running if self.tables.known(name).phase is phase]

    def _submit(self) -> Steps:
        while self.waiting and len(self.running) < self.service.window and not self.crowded:
            number = self.waiting.popleft()
            name = f"line {number + 1}"
            if name in self.tables.names:
                name += f" again {self.returned}"
            self.running[name] = number
            self.decodes[name] = min(self.service.decodes, self.service.requests[number].output_length)
            yield Step(submit=self.service.submit(number, name))

    def _forward(self) -> Steps:
        names = self._in(Phase.PREFILL)
        if not names or (yield Step(forward=names)):
            return
        if len(names) > 1 and (yield Step(forward=names[:1])):
            return
        if self._in(Phase.READY):
            return  # they leave soon
        self.crowded = len(names) > 1
        name = names[-1]
        yield Step(abort=name)
        number = self._leave(name)
        if self.crowded:
            self.returned += 1
            self.waiting.appendleft(number)
        else:
            self.dropped += 1

    def _decode(self) -> Steps:
        names = [name for name in self._in(Phase.READY) if self.decodes[name]]
        for name in names:
            self.decodes[name] -= 1
        if not names or (yield Step(decode=names)):
            return
        for name in names:
            if not (yield Step(decode=[name])):
                self.decodes[name] = 0

    def _finish(self) -> Steps:
        for name in self._in(Phase.READY):
            if not self.decodes[name]:
                yield Step(finish=name)
                self._leave(name)
                self.crowded = False

    def _leave(self, name: str) -> int:
        del self.decodes[name]
        return self.running.pop(name)
