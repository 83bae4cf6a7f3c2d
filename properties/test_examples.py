"""The examples are right: each of their kernels passes the kit, and all that they declare is tried."""

from __future__ import annotations

import runpy
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from properties.kernels.check import Check, Plan
from properties.kernels.verdicts import Verdict
from properties.kernels.watched import Children

EXAMPLES = Path(__file__).parent.parent / "examples"
DRAWN = 10  # cases of each operation, besides its corners

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
