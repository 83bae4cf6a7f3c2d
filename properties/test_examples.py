"""The examples are right: each of their kernels passes the kit, and all that they declare is tried."""

from __future__ import annotations

import multiprocessing
import os
import runpy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from properties.kernels.check import Check, Plan
from properties.kernels.verdicts import Verdict
from properties.kernels.watched import Children

EXAMPLES = Path(__file__).parent.parent / "examples"
DRAWN = 10  # cases of each operation, besides its corners
HOPPER = 90  # compute capability × 10
SHARED_BYTES = 227 << 10  # that a block can have there

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not part of the package")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def verdict(file: str, op: str) -> Verdict:
    """Of one operation of an example."""
    plan = Plan(target=str(EXAMPLES / file), ops=(op,), examples=DRAWN)
    with Children(plan.target, plan.op, plan.limit) as children:
        return Check(plan, children).verdict(op)


@cache
def operations(file: str) -> tuple[str, ...]:
    """What the kit finds in an example."""
    with Children(str(EXAMPLES / file)) as children:
        return tuple(children.loaded().capabilities)


def assert_passes(found: Verdict) -> None:
    assert (found.verdict, found.why) == ("pass", ""), found.failure
    assert found.cases > DRAWN


@needs_triton
@pytest.mark.parametrize("op", ["rerange", "logical_to_physical", "materialize", "index_write", "sparse_mla"])
def test_triton_kernels_keep_the_contract(op: str) -> None:
    """Interpreted, where there is no GPU."""
    assert_passes(verdict("triton_kernels.py", op))


# Of each kernel: arguments that are no int32, and blocks as they are on a GPU.
LAUNCHES: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("_to_physical", {"slots": "*i32", "physical": "*i32"}, {"BLOCK": 1024}),
    ("_copy_segments", {"copies": "*i64", "buffers": "*i64", "rows": "*i64"}, {"ROWS": 16, "COLUMNS": 128}),
    (
        "_copy_pages",
        {"pages": "*i64", "shards": "*i32", "page_table": "*i32", "view": "*i32", "rank_stride": "i64"},
        {"SLOTS": 64, "WORDS": 64},
    ),
    (
        "_write_index",
        {"pages": "*u8", "slots": "*i64", "keys": "*u8", "scales": "*fp32"},
        {"TOKENS": 32, "DIM": 128},
    ),
    *(
        (
            "_attend",
            {"q": of, "kv": of, "out": of, "chosen": "*i32", "lse": "*fp32", "sm_scale": "fp32"},
            {"PRODUCT": of[1:], "HEADS": 16, "KEYS": 32, "STEPS": 64, "LATENT": 512, "ROPE": 64},
        )
        for of in ("*bf16", "*fp32")
    ),
]


def compiled(folder: str) -> list[tuple[str, int]]:
    """Name and shared memory of each launch, compiled for Hopper. The process must not know Triton yet."""
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
    kernels = runpy.run_path(str(EXAMPLES / "triton_kernels.py"))
    import triton.language as tl
    from triton import compile as compile_
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = []
    for name, types, constants in LAUNCHES:
        kernel = kernels[name]
        values = constants | {key: tl.dtype(value) for key, value in constants.items() if key == "PRODUCT"}
        signature = {arg: "constexpr" if arg in values else types.get(arg, "i32") for arg in kernel.arg_names}
        places = {(kernel.arg_names.index(arg),): value for arg, value in values.items()}
        made = compile_(
            ASTSource(kernel, signature, places),
            target=GPUTarget("cuda", HOPPER, 32),
            options={"num_warps": 8 if name == "_attend" else 4},
        )
        assert "cubin" in made.asm
        found.append((name, made.metadata.shared))
    return found


@needs_triton
def test_triton_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """The interpreter takes what the compiler does not, such as a name that changes its shape in a loop."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(compiled, (str(tmp_path),))
    assert [name for name, _ in found] == [name for name, _, _ in LAUNCHES]
    assert all(shared <= SHARED_BYTES for _, shared in found)


@pytest.mark.parametrize("op", ["owner_mask", "lse_merge"])
def test_compiled_kernels_keep_the_contract(op: str) -> None:
    assert_passes(verdict("compiled_kernels.py", op))


@pytest.mark.parametrize("op", ["mla_write", "mla_read"])
def test_custom_ops_keep_the_contract(op: str) -> None:
    assert_passes(verdict("custom_op.py", op))


@pytest.mark.parametrize(
    ("file", "count"),
    [
        pytest.param("triton_kernels.py", 5, marks=needs_triton),
        ("compiled_kernels.py", 2),
        ("custom_op.py", 2),
    ],
)
def test_every_kernel_of_an_example_is_tried_above(file: str, count: int) -> None:
    assert len(operations(file)) == count


def test_custom_ops_are_registered_truly() -> None:
    checked = runpy.run_path(str(EXAMPLES / "custom_op.py"))["OPCHECKED"]
    assert len(checked) == 2
    for op, arguments in checked:
        assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}
