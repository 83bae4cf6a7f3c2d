"""What only a GPU shows: huge offsets, other streams, other devices, a GPU that is lost."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from properties.command_line import cpkv
from properties.gpu_marks import needs_gpus
from properties.kernel_files import RIGHT, Write
from properties.kernel_trials import candidate_of, named
from properties.kernels import faults
from properties.kernels.adversaries import ADVERSARIES
from properties.kernels.adversaries.adversary import Adversary
from properties.kernels.cases.catalogue import CASES
from properties.kernels.cases.slots import LogicalToPhysical
from properties.kernels.handling import PLAIN
from properties.kernels.trial import Trial
from refmodel.ops.catalogue import OPS

F = TypeVar("F", bound=Callable[..., object])


def on_a_gpu(test: F) -> F:
    """Needs one."""
    marked: F = pytest.mark.nccl(needs_gpus(1)(test))
    return marked


@on_a_gpu
@pytest.mark.parametrize("adversary", [one for one in ADVERSARIES if one.huge], ids=named)
def test_offsets_of_32_bits_are_caught_by_a_huge_case(adversary: Adversary) -> None:
    huge = CASES[adversary.op].huge()
    assert huge is not None
    right, wrong = (candidate_of(f, adversary.op) for f in (OPS[adversary.op].reference, adversary.function))
    assert Trial(right, "cuda").alone(huge) is None
    finding = Trial(wrong, "cuda").alone(huge)
    assert finding is not None
    assert finding.law == adversary.law


@on_a_gpu
def test_a_kernel_on_another_stream_than_the_current_one_is_caught() -> None:
    def too_early(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return OPS["logical_to_physical"].reference(slots, rank, world_size, page_size)[0]

    case = LogicalToPhysical(world=4, page=64, rank=3, slots=300)
    finding = Trial(candidate_of(too_early, "logical_to_physical"), "cuda").once(case, PLAIN)
    assert finding is not None
    assert finding.law == "O2"
    right = candidate_of(OPS["logical_to_physical"].reference, "logical_to_physical")
    assert Trial(right, "cuda").once(case, PLAIN) is None


@on_a_gpu
def test_results_on_another_device_are_caught() -> None:
    def at_home(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
        return OPS["logical_to_physical"].reference(slots.cpu(), rank, world_size, page_size)[0]

    case = LogicalToPhysical(world=4, page=64, rank=3, slots=300)
    finding = Trial(candidate_of(at_home, "logical_to_physical"), "cuda").once(case, PLAIN)
    assert finding is not None
    assert finding.law == faults.DEVICE


@on_a_gpu
def test_a_gpu_that_a_kernel_has_lost_is_a_crash_and_leaves_the_other_operations(kernels: Write) -> None:
    file = kernels(
        RIGHT.replace("    return", "    slots[slots + 2**40] if len(slots) > 40 else None\n    return")
        + "\ndef owner_mask(slots, rank, world_size, page_size):\n"
        "    return OWNER_MASK.reference(slots, rank, world_size, page_size)[0]\n"
    )
    result = cpkv("check", file, "--device", "cuda")
    assert "fail (crash)" in result.output
    assert "device-side assert" in result.output
    assert "check broke: 1 pass, 1 fail" in result.output


@on_a_gpu
def test_a_failure_past_32_bits_replays() -> None:
    target = "properties.kernels.adversaries.offsets:read_offsets_in_32_bits"
    result = cpkv("check", target, "--op", "mla_read", "--device", "cuda", "--examples", "0")
    assert "fail (F2)" in result.output
    replay = next(line for line in result.output.splitlines() if "replay" in line)
    words = shlex.split(replay.partition("cpkv ")[2])
    again = cpkv(*words)
    assert "fail (F2)" in again.output
    assert "check broke: 1 fail; 1 case" in again.output


@on_a_gpu
def test_a_gpu_without_room_is_nobodys_fault(kernels: Write) -> None:
    file = kernels(
        "import torch\n"
        + RIGHT.replace("    return", "    torch.empty(2**48, device=slots.device)\n    return")
    )
    result = cpkv("check", file, "--device", "cuda")
    assert "logical_to_physical: unknown, CUDA out of memory" in result.output
    assert "check held" not in result.output
