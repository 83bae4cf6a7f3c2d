"""How results are compared: byte for byte, or within a budget that the arguments themselves set (law A5).

Shapes, dtypes and devices are compared before any judge is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from refmodel.errors import Finding
from refmodel.ops.op import Arguments, Judge, Results
from refmodel.oracle import relative_error
from refmodel.precision import budget


def equal_bytes(law: str) -> Judge:
    """Every tensor bit for bit: NaN equals the same NaN and nothing else, −0 is not 0."""

    def judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
        for number, (got, right) in enumerate(zip(received, expected, strict=True)):
            different = _bits(got) != _bits(right)
            if bool(different.any()):
                place = tuple(different.nonzero()[0].tolist())
                what = (
                    f"result {number}, {int(different.sum())} of {got.numel()} elements, first {list(place)}"
                )
                return Finding(law, what, str(right[place].item()), str(got[place].item()))
        return None

    return judge


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, one an element."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def within_budget(law: str, reference: Callable[..., Results]) -> Judge:
    """Every tensor within the budget of :mod:`refmodel.precision`.

    The exact result is the reference's in float64, the twin is the reference's in the arguments' own types.
    Infinities must stand where they stand there; NaN exceeds every budget.
    """

    def judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
        exact = reference(**{name: _wide(value) for name, value in arguments.items()})
        for number, (got, twin, right) in enumerate(zip(received, expected, exact, strict=True)):
            if finding := _beyond(law, number, got, twin, right):
                return finding
        return None

    return judge


def _beyond(
    law: str, number: int, got: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor
) -> Finding | None:
    infinite = exact.isinf()
    if not torch.equal(got.double()[infinite], exact[infinite]):
        return Finding(law, f"result {number}, where the exact one is infinite", "the same", "others")
    finite = ~infinite
    if not bool(finite.any()):
        return None
    right = exact[finite].cpu().numpy()
    error = relative_error(got.double()[finite].cpu().numpy(), right)
    most = budget(relative_error(twin.double()[finite].cpu().numpy(), right), eps=torch.finfo(got.dtype).eps)
    if error <= most:  # not `>`: NaN must not pass
        return None
    return Finding(law, f"relative error of result {number}", f"<= {most:.3g}", f"{error:.3g}")


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
