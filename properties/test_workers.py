"""Workers beside each other do not stand on each other's processors."""

from __future__ import annotations

import os

import pytest
import torch

from properties.workers import workers

_ready_with: list[str] = []  # of a worker


def ready(what: str) -> None:
    _ready_with.append(what)


def told(_: int) -> tuple[list[str], int, frozenset[int]]:
    """What a worker was told, its threads, and its processors."""
    mine = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
    return _ready_with, torch.get_num_threads(), mine


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_each_worker_is_made_ready_and_keeps_to_its_share(jobs: int) -> None:
    with workers(jobs, ready, "now") as pool:
        answers = list(pool.map(told, range(40 * jobs)))
    assert {(tuple(said), threads) for said, threads, _ in answers} == {(("now",), 1)}
    shares = {share for _, _, share in answers}
    if hasattr(os, "sched_getaffinity"):
        all_of_them = frozenset(os.sched_getaffinity(0))
        assert all(share and share <= all_of_them for share in shares)
        if jobs == 1:
            assert shares == {all_of_them}
        # Equal, where there are more workers than processors, or with nothing in common.
        assert all(one == other or not one & other for one in shares for other in shares)
