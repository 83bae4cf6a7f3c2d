"""Which worlds this machine can run, and what is missing for the others."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Threads, one running at a time: this many start and stop in under a second.
LARGEST_LOCKSTEP = 1024
# Processes of about 100 MB each, every one connected to every other.
LARGEST_GLOO = 64


@dataclass(frozen=True, slots=True)
class Available:
    """Whether this machine can run a kind of world."""

    kind: str
    available: bool
    largest: int  # ranks; 0 if not available
    note: str  # what the ranks are, or what is missing


def available() -> tuple[Available, ...]:
    """What this machine can run, of all kinds of worlds."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        Available("lockstep", True, LARGEST_LOCKSTEP, "threads of one process, one running at a time"),
        _entry("lockstep-cuda", missing_for_cuda(), LARGEST_LOCKSTEP, "the same, with tensors on one GPU"),
        _entry("gloo", missing_for_gloo(), LARGEST_GLOO, f"processes, on {processors} processors"),
        _entry("nccl", missing_for_nccl(), torch.cuda.device_count(), "processes, each with a GPU"),
        _entry("torchrun", missing_for_torchrun(), started_size(), "the processes that torchrun started"),
    )


def _entry(kind: str, missing: str, largest: int, note: str) -> Available:
    return Available(kind, False, 0, missing) if missing else Available(kind, True, largest, note)


def missing_for_gloo() -> str:
    """What is missing for a gloo world; empty if nothing is."""
    if not dist.is_gloo_available():
        return "torch was built without gloo"
    return _missing_for_processes()


def missing_for_cuda() -> str:
    """What is missing for tensors on a GPU; empty if nothing is."""
    return "" if torch.cuda.is_available() else "no CUDA GPU"


def missing_for_nccl() -> str:
    """What is missing for an NCCL world of one rank; empty if nothing is."""
    if missing_for_cuda():
        return missing_for_cuda()
    if not dist.is_nccl_available():
        return "torch was built without NCCL"
    return _missing_for_processes()


def missing_for_torchrun() -> str:
    """What is missing for the world that was started; empty if nothing is."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    unset = [name for name in needed if not os.environ.get(name)]
    return f"not started by torchrun: {', '.join(unset)} not set" if unset else ""


def started_size() -> int:
    """Ranks of the world that this process was started in; 0 if it was not, or its size is no number."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isascii() and size.isdigit() else 0


def started_rank() -> int:
    """This process's rank in the world that it was started in; 0 if it was not."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isascii() and rank.isdigit() else 0


def _missing_for_processes() -> str:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "this system cannot start processes by forkserver"
    return ""
