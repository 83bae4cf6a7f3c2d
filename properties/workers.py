"""Worker processes beside each other: each computes with one core, and keeps to its share of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from sim.garbage import collect_seldom


def workers(jobs: int, ready: Callable[..., None], *args: Any) -> ProcessPoolExecutor:
    """A pool of ``jobs`` processes; each calls ``ready(*args)`` before its first work."""
    context = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_begin, initargs=(context.Value("i"), jobs, ready, args)
    )


def _begin(begun: Any, jobs: int, ready: Callable[..., None], args: tuple[Any, ...]) -> None:
    with begun.get_lock():
        place, begun.value = begun.value, begun.value + 1
    torch.set_num_threads(1)
    collect_seldom()
    _keep_to_share(place, jobs)
    ready(*args)


def _keep_to_share(place: int, jobs: int) -> None:
    """Leave the other processors to the other workers.

    The ranks of a lockstep run keep to one processor, that of their caller; two callers that happen to be
    on the same one would share it for a whole run, and another would idle: 6 % of two processors.
    """
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, processors[place % len(processors) :: jobs])
