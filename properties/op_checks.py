"""What a judge says of a kernel on a case, and which cases to ask about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from refmodel.errors import Finding
from refmodel.ops.op import Arguments, Kind, Op, Results
from refmodel.storage.codecs import as_bytes


def any_case(op: Op) -> st.SearchStrategy[Any]:
    """Corners, which are many of the shapes that hurt, and any others."""
    return st.sampled_from(list(CASES[op.name].corners())) | CASES[op.name].strategy()


def copied(arguments: Arguments) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }


def given_as(op: Op, arguments: Arguments, index: torch.dtype) -> dict[str, Any]:
    """The arguments with indices of a type."""
    kinds = {argument.name: argument.kind for argument in op.arguments}
    return {
        name: value.to(index) if kinds[name] is Kind.INDEX else value for name, value in arguments.items()
    }


def judged(case: Case, kernel: Callable[..., Any], index: torch.dtype = torch.int64) -> Finding | None:
    """What a judge says of a kernel, with arguments of its own; results have the shapes that they should."""
    op = case.op
    before, mine, others = (given_as(op, case.arguments(), index) for _ in range(3))
    results = as_results(op, kernel(**mine))
    spaces = op.spaces(**before)
    assert [(tuple(r.shape), r.dtype) for r in results] == [(space.shape, space.dtype) for space in spaces]
    return op.judge(before, op.outcome(mine, results), op.outcome(others, op.reference(**others)))


def as_results(op: Op, returned: Any) -> Results:
    if not op.results:
        return ()
    return tuple(returned) if isinstance(returned, tuple) else (returned,)


def bits(arguments: Arguments) -> dict[str, Any]:
    """Of tensors their bytes, so that NaN equals itself."""
    return {
        name: as_bytes(value[None]).tolist() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
