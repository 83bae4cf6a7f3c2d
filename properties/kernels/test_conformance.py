"""Somebody's kernels against the contract, one test an operation.

``pytest --pyargs properties.kernels --cpkv-kernels TARGET``; without a target there is nothing to test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from properties.kernels.check import EXAMPLES, Check, Plan
from properties.kernels.known import read_known
from properties.kernels.report import failure_lines, headline
from properties.kernels.watched import Children
from refmodel.errors import InvalidInput
from refmodel.ops.catalogue import OPS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # The target is not loaded here: that runs its code, and collecting should not.
    metafunc.parametrize("op", list(OPS) if metafunc.config.getoption("--cpkv-kernels", None) else [])


@pytest.fixture(scope="module")
def check(request: pytest.FixtureRequest) -> Iterator[Check]:
    options = request.config
    known = options.getoption("--cpkv-known")
    examples = options.getoption("--cpkv-examples")
    plan = Plan(
        target=options.getoption("--cpkv-kernels"),
        device=options.getoption("--cpkv-device"),
        world=options.getoption("--cpkv-world"),
        examples=EXAMPLES if examples is None else examples,
        seed=options.getoption("--cpkv-seed"),
        known=read_known(Path(known)) if known else (),
    )
    with Children(plan.target) as children:
        try:
            check = Check(plan, children)
        except InvalidInput as error:  # the same for every operation
            pytest.exit(f"cpkv: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
        yield check


def test_the_kernel_keeps_the_contract(check: Check, op: str) -> None:
    if op not in check.capabilities:
        pytest.skip(f"{check.plan.target} has no {op}")
    verdict = check.verdict(op)
    if verdict.verdict == "unknown":
        pytest.skip(verdict.why)
    if verdict.verdict == "known":
        pytest.xfail(verdict.why)
    if verdict.failure is not None:
        lines = [f"{name:<12}  {value}" for name, value in failure_lines(verdict.failure)]
        pytest.fail("\n".join([headline(verdict.failure), *lines, "", verdict.failure.code]), pytrace=False)
    assert verdict.cases
