"""What a kernel declares is tried, and nothing beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from properties.command_line import cpkv
from properties.kernel_files import RIGHT, Write
from properties.kernel_trials import candidate_of, tried, verdict_of
from properties.kernels.adversaries import cheats
from refmodel.ops.catalogue import OPS
from refmodel.ops.declare import Capabilities, kernel
from sim.kernels.candidate import Candidate


def test_one_that_is_right_for_contiguous_tensors_passes_if_it_says_so() -> None:
    flat = cheats.flat_memory
    assert tried(candidate_of(flat, "rerange")).counterexample is not None
    assert tried(Candidate(OPS["rerange"], flat, Capabilities(contiguous=True))).counterexample is None


def test_one_that_knows_one_index_type_passes_if_it_says_so() -> None:
    wide = cheats.always_int64
    capabilities = Capabilities(index_dtypes=("int64",))
    assert tried(Candidate(OPS["logical_to_physical"], wide, capabilities)).counterexample is None


def test_only_declared_page_sizes_are_tried_and_each_of_them() -> None:
    seen: set[int] = set()

    @kernel("logical_to_physical", page_sizes=(64, 48))
    def noting(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
        seen.add(page_size)
        return OPS["logical_to_physical"].reference(slots, rank, world_size, page_size)[0]

    result = tried(candidate_of(noting, "logical_to_physical"))
    assert result.counterexample is None
    assert seen == {64, 48}
    assert not result.untried


@pytest.mark.parametrize(("op", "width"), [("sparse_mla", 576), ("mqa_logits", 128), ("mla_write", 96)])
def test_a_kernel_for_one_width_passes_if_it_says_so(op: str, width: int) -> None:
    contract = OPS[op]
    asked: set[int] = set()

    def narrow(*arguments: Any) -> Any:
        assert contract.row_width is not None
        asked.add(contract.row_width(*arguments))
        if asked != {width}:
            raise ValueError(f"only width {width}")
        return contract.reference(*arguments)

    result = tried(Candidate(contract, narrow, Capabilities(widths=(width,))))
    assert (result.counterexample, result.untried, asked) == (None, "", {width})
    assert result.cases >= 10
    assert tried(Candidate(contract, narrow, Capabilities())).counterexample is not None


def test_a_width_that_no_case_can_have_is_named() -> None:
    found = tried(
        Candidate(OPS["quantize_mla"], OPS["quantize_mla"].reference, Capabilities(widths=(576, 1)))
    )
    assert found.untried == "width 1"


def test_nothing_is_said_where_no_case_is_within_what_is_declared(kernels: Write) -> None:
    file = kernels(RIGHT.replace("def ", "CAPABILITIES = {'rerange': {'dtypes': ['complex64']}}\ndef ", 1)
                   + "\ndef rerange(buffers, prefixes, tokens, world_size, page_size): ...\n")  # fmt: skip
    verdict = verdict_of(str(file), "rerange")
    assert (verdict.verdict, verdict.why) == ("unknown", "no case within the declared capabilities")
    assert verdict.declared == {"dtypes": "complex64"}


def test_a_missing_device_is_named(kernels: Write) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    file = kernels(f"CAPABILITIES = {{'logical_to_physical': {{'devices': ('cuda',)}}}}\n{RIGHT}")
    verdict = verdict_of(str(file), "logical_to_physical")
    assert (verdict.verdict, verdict.why) == ("unknown", "no CUDA GPU")
    on_cpu = verdict_of(str(file), "logical_to_physical", device="cpu")
    assert (on_cpu.verdict, on_cpu.why) == ("unknown", "declared for cuda only")
    assert cpkv("check", file).exit_code == 2
