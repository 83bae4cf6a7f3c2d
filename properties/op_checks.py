"""What holds of every operation, its cases and its adversaries."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st

from properties.kernels.adversaries.adversary import Adversary
from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from refmodel.errors import Finding
from refmodel.ops.op import Arguments, Op


def any_case(op: Op) -> st.SearchStrategy[Any]:
    """Corners, which are many of the shapes that hurt, and any others."""
    return st.sampled_from(list(CASES[op.name].corners())) | CASES[op.name].strategy()


def copied(arguments: Arguments) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }


def judged(op: Op, function: Any, case: Case) -> Finding | None:
    """What the judge says of a function on a case."""
    arguments, mine, right = (case.arguments() for _ in range(3))
    received = op.outcome(mine, function(**mine) or ())
    return op.judge(arguments, received, op.outcome(right, op.reference(**right)))


def check_is_a_value(case: Case) -> None:
    """The same arguments at every call, and the same case from its JSON and from its fields."""
    first, second = case.arguments(), case.arguments()
    assert list(first) == [argument.name for argument in case.op.arguments]
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, second[name], rtol=0, atol=0, equal_nan=True)
        else:
            assert value == second[name]
    assert msgspec.json.decode(msgspec.json.encode(case), type=type(case)) == case
    assert type(case)(**asdict(case)) == case


def check_promises(case: Case) -> None:
    """Results have the spaces that were promised, and what is not to be written is as it was."""
    arguments, before = case.arguments(), case.arguments()
    spaces = case.op.spaces(**arguments)
    results = case.op.reference(**arguments)
    assert [(tuple(r.shape), r.dtype) for r in results] == [(space.shape, space.dtype) for space in spaces]
    for name in set(arguments) - set(case.op.written):
        if isinstance(value := arguments[name], torch.Tensor):
            torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def check_caught(adversary: Adversary) -> None:
    """Some corner tells, and the first that does names the law."""
    op, corners = CASES[adversary.op].op, CASES[adversary.op].corners()
    found = next(filter(None, (judged(op, adversary.function, case) for case in corners)), None)
    assert found is not None
    assert found.law == adversary.law
