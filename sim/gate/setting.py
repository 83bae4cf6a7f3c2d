"""How every run of a gate is done, whatever runs: the order of ranks, and what they suffer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from sim.faults.fault import Fault
from sim.kernels.loading import Named
from sim.lockstep.schedule import Schedule, in_order, priority_changing, randomly, replay
from sim.machine import started_size
from sim.world import World


@dataclass(frozen=True, slots=True)
class Setting:
    """Conditions of a run. ``schedule`` is as :func:`parse_schedule` reads it, and of lockstep only."""

    seed: int = 0
    schedule: str = "random"
    faults: tuple[Fault, ...] = ()
    self_check: bool = False  # on lockstep: run each schedule twice, and compare
    kernels: Named | None = None  # stand in the place of the reference

    @property
    def options(self) -> str:
        """The options of ``cpkv gate`` that say the same."""
        options = ["--seed", str(self.seed)]
        if self.schedule != "random":
            options += ["--schedule", self.schedule]
        for fault in self.faults:
            options += ["--fault", str(fault)]
        if self.self_check:
            options.append("--self-check")
        if self.kernels is not None:
            options += ["--kernels", self.kernels.text]
        return shlex.join(options)

    def open(self, world: str) -> World:
        """The world of a name such as "lockstep:4", under this setting."""
        return World.parse(world, seed=self.seed, schedule=parse_schedule(self.schedule, self.seed))


PLAIN = Setting()


def kind_and_size(world: str) -> tuple[str, int | None]:
    """ "gloo:4" → ("gloo", 4), "gloo" → ("gloo", None). That of torchrun is not ours to choose.

    :class:`InvalidInput` for a kind that does not exist.
    """
    kind, _, size = world.partition(":")
    if kind == "torchrun" and not size:
        size = str(started_size())
    World.parse(f"{kind}:{size or 1}").close()
    return kind, int(size) if size else None


def parse_schedule(text: str, seed: int) -> Schedule:
    """ "random", "in-order", "pct" (priority-changing), "pct:4" (of depth 4), or the token of a run."""
    name, _, depth = text.partition(":")
    if name == "pct" and (not depth or depth.isdecimal()):
        return priority_changing(seed, depth=int(depth or 3))
    return {"random": randomly(seed), "in-order": in_order()}.get(text) or replay(text)
