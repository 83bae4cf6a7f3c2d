"""Times of kernels: of the right calls, on inputs that are not warm, against what the machine can do."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import torch
from rich.console import Console

from properties.gpu_marks import needs_gpus
from properties.kernels.cases.catalogue import CASES
from properties.kernels.speed import CLONES, Speed, largest, speed, speed_table
from refmodel.ops.catalogue import OPS
from sim.kernels.candidate import Candidate

CASE = next(case for case in CASES["logical_to_physical"].corners() if case.arguments()["slots"].numel() == 4)
SLEEP = 0.02


def test_a_kernel_that_sleeps_is_slow_and_the_reference_is_not() -> None:
    def sleeper(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
        time.sleep(SLEEP)
        return slots

    found = speed(Candidate(OPS["logical_to_physical"], sleeper), CASE, "cpu")
    assert found.seconds >= SLEEP > found.reference_seconds > 0
    assert found.gain < 1
    assert found.byte_rate == found.bytes / found.seconds
    assert found.bytes == OPS["logical_to_physical"].cost(**CASE.arguments()).bytes


def test_inputs_take_turns_and_hold_what_the_case_says() -> None:
    seen: list[tuple[int, list[int]]] = []

    def looker(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
        seen.append((slots.data_ptr(), slots.tolist()))
        return slots

    speed(Candidate(OPS["logical_to_physical"], looker), CASE, "cpu")
    assert len({address for address, _ in seen}) == CLONES
    assert all(one != other for (one, _), (other, _) in pairwise(seen))
    assert all(values == CASE.arguments()["slots"].tolist() for _, values in seen)


def test_what_must_get_its_results_tensors_gets_them() -> None:
    def filler(slots: torch.Tensor, rank: int, world_size: int, page_size: int, *, out: torch.Tensor) -> None:
        out.copy_(slots)

    assert speed(Candidate(OPS["logical_to_physical"], filler), CASE, "cpu").seconds > 0


def test_the_case_that_is_timed_moves_most_bytes() -> None:
    cases = list(CASES["rerange"].corners())
    chosen = largest(cases)
    assert chosen.arguments()["buffers"].nbytes == max(case.arguments()["buffers"].nbytes for case in cases)


def test_the_table_says_that_times_of_a_cpu_mean_little() -> None:
    found = Speed("rerange", "…", "CPU, 2 threads", 0.5, 1.0, bytes=10**9, flops=0, copy_rate=8e9)
    assert shown(found).count("mean little") == 1
    assert "2.00 ×" in shown(found)
    assert "25%" in shown(found)
    assert "mean little" not in shown(replace(found, device="NVIDIA H200"))


def shown(found: Speed) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(speed_table([found]))
    return capture.get()


@needs_gpus(1)
def test_on_a_gpu_a_copy_is_about_as_fast_as_a_copy() -> None:
    def copied(buffers, prefixes, tokens, world_size, page_size):  # type: ignore[no-untyped-def]
        return buffers.clone()

    found = speed(Candidate(OPS["rerange"], copied), largest(CASES["rerange"].corners()), "cuda")
    assert found.device.startswith("NVIDIA")
    assert 0 < found.share < 1.5
