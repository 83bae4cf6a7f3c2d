"""The ``torch.distributed`` backend ``lockstep``: the groups of a run, and how torch makes new ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim.failures import WorldUnavailable
from sim.lockstep.floor import Floor
from sim.lockstep.meeting import Meetings
from sim.lockstep.messages import Messages
from sim.surface.group import Surface
from sim.surface.operations import Operation
from sim.surface.recorder import Recorder
from sim.surface.work import Pending

BACKEND = "lockstep"

# torch's name of a default group, in every world.
DEFAULT_GROUP = "0"


class Groups:
    """All groups of one run, each of them made once, by the first of its members that asks for it."""

    def __init__(
        self, world: str, floor: Floor, recorders: Sequence[Recorder], device: torch.device | None
    ) -> None:
        self._world = world
        self._floor = floor
        self._recorders = recorders
        self._device = device
        self._groups: dict[str, _Group] = {}

    def member(self, name: str, members: tuple[int, ...], rank: int) -> Surface:
        """The group of this name as rank ``rank`` of it sees it; ``members`` are world ranks."""
        group = self._groups.setdefault(name, _Group(self._world, members, self._floor))
        if group.members != members:
            raise InvalidInput(
                f"group {name}",
                expected=f"ranks {list(group.members)}, with which another rank made it",
                received=f"ranks {list(members)}",
                where=Where(rank=members[rank]),
                fix="Every rank calls new_group for all groups, in one order, also for those it is not in.",
            )

        return Surface(
            rank,
            len(members),
            recorder=self._recorders[members[rank]],
            transport=partial(group.carry, rank),
            backend=BACKEND,
            name=name,
            device=self._device,
        )


class _Group:
    def __init__(self, world: str, members: tuple[int, ...], floor: Floor) -> None:
        self.members = members
        self._floor = floor
        self._meetings = Meetings(world, members, floor)
        self._messages = Messages(world, members, floor)

    def carry(self, rank: int, operation: Operation, call: Call) -> Pending | None:
        self._floor.check_turn(self.members[rank])
        if operation.is_message:
            return self._messages.post(rank, operation, call)
        return self._meetings.attend(rank, operation, call)


class _Here(threading.local):
    """Of the thread of a rank: the groups of its run, in which torch makes new ones."""

    groups: Groups | None = None


here = _Here()


def _create_group(options: Any, backend_options: object) -> dist.ProcessGroup:
    """What torch calls for ``init_process_group("lockstep")`` and ``new_group``."""
    if here.groups is None:
        raise WorldUnavailable(
            "a process group on lockstep",
            expected="to be made inside a run",
            received=f"a group of {options.group_size} ranks outside of any",
            fix="Run the program with World.lockstep(size).run(program); it receives its group.",
        )
    members = tuple(options.global_ranks_in_group)
    return here.groups.member(options.group_id, members, options.group_rank)


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])
