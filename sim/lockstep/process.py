"""What torch keeps once for a process: of each rank its own, and set aside while a run lasts."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from refmodel.errors import InvalidInput
from sim.lockstep.backend import BACKEND, here
from sim.surface.group import outsiders_refused

# The stub lacks thread isolation.
native: Any = _distributed_c10d


@dataclass(eq=False)
class RankWorld:
    """torch's process-group state of one rank: the attributes of ``distributed_c10d._World``."""

    default_pg: dist.ProcessGroup | None = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, str] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)

    def add_default_group(self, group: dist.ProcessGroup, store: Any) -> None:
        """As ``init_process_group`` would."""
        size = group.size()
        self.default_pg = group
        self.group_count = 1  # of which the next group gets its name
        self.pg_map[group] = (BACKEND, store)
        self.pg_names[group] = group.group_name
        self.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self.pg_backend_config[group] = f"cpu:{BACKEND},cuda:{BACKEND}"
        tag = f"ptd:{group.group_name}"
        self.tags_to_pg = {"": [group], tag: [group]}
        self.pg_to_tag[group] = tag


_GARBAGE_ALLOCATIONS = 100_000
# One run at a time: torch's state, which is set aside, is one per process.
_process = threading.Lock()


@contextmanager
def process_set_aside() -> Iterator[None]:
    """torch's process-wide state is the run's within the block, and as it was afterwards."""
    if here.groups is not None:
        raise InvalidInput(
            "a lockstep run",
            expected="to be started outside of any rank",
            received="a run inside a rank of another",
            fix="Start the inner run in the program that starts the outer one.",
        )
    with _process:
        own_world, own_threads, own_numbers = c10d._world, torch.get_num_threads(), torch.get_rng_state()
        # Else torch knows a group by its name alone, and the second rank's "0" would be refused.
        native._set_thread_isolation_mode(True)
        # As in a gloo worker, so that a rank's sums have the same bits in both; new threads inherit it.
        torch.set_num_threads(1)
        # Ledgers grow by what is no garbage; searching them, and all of torch, takes a third of a run's time.
        own_garbage = gc.get_threshold()
        gc.set_threshold(own_garbage[0] and max(own_garbage[0], _GARBAGE_ALLOCATIONS), *own_garbage[1:])
        try:
            with outsiders_refused():
                yield
        finally:
            gc.set_threshold(*own_garbage)
            torch.set_rng_state(own_numbers)
            torch.set_num_threads(own_threads)
            native._set_thread_isolation_mode(False)
            c10d._world = own_world
