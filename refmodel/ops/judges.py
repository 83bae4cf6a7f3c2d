"""How results are compared: byte for byte, or within a budget that the arguments themselves set (law A5).

Shapes, dtypes and devices are compared before any judge is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from refmodel.errors import Finding
from refmodel.ops.op import Arguments, Judge, Results
from refmodel.precision import FP64_BUDGET, budget


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


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """What the errors of one result are measured by, row by row: one with few keys would hide in others."""

    largest: torch.Tensor  # [rows] errors are relative to it
    wide: (
        torch.Tensor
    )  # [rows] roundings of the accumulating type that a right result may have and the twin not
    narrow: torch.Tensor  # [rows] the same of the type of the result; of a sum, the root of their squares


Scales = Callable[[Arguments, Results], tuple[Scale, ...]]  # of the arguments and the exact results


def within_budget(
    law: str,
    reference: Callable[..., Results],
    scales: Scales,
    *,
    defined: Callable[[Arguments], torch.Tensor] | None = None,
) -> Judge:
    """Every row within the budget of :mod:`refmodel.precision`; 1e-10 where results are float64.

    The exact result is the reference's in float64, the twin is the reference's in the arguments' own types.
    Sums in another order lose what the twin does not: ``scales`` says how many roundings more.
    Infinities must stand where they stand there; NaN exceeds every budget. ``defined`` is a mask of what the
    operation promises, of the results' shape; None for everything.
    """

    def judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
        exact = reference(**{name: _wide(value) for name, value in arguments.items()})
        results = zip(received, expected, exact, scales(arguments, exact), strict=True)
        for number, (got, twin, right, scale) in enumerate(results):
            mask = torch.ones_like(right, dtype=torch.bool) if defined is None else defined(arguments)
            compared = (_of(mask, values) for values in (got, twin, right))
            if finding := _beyond(law, f"of result {number}", scale, *compared):
                return finding
        return None

    return judge


def largest_of_rows(values: torch.Tensor) -> torch.Tensor:
    """[rows, …] → [rows]: largest magnitude of each, 0 of nothing; NaN and infinities left out."""
    magnitudes = values.double().abs().nan_to_num(nan=0, posinf=0).flatten(1)
    return torch.cat([magnitudes, magnitudes.new_zeros(len(values), 1)], 1).amax(1)


def _of(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[rows, elements], 0 where nothing is promised."""
    return values.masked_fill(~mask, 0).flatten(1)


def _beyond(
    law: str, what: str, scale: Scale, got: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor
) -> Finding | None:
    infinite = exact.isinf()
    wrong = (infinite & (got.double() != exact)).any(1)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        expected, received = (str(t[row][infinite[row]].tolist()) for t in (exact, got))
        return Finding(law, f"row {row} {what}, where it must be infinite", expected, received)
    error, twin_error = (_errors(t, exact, scale.largest) for t in (got, twin))
    if got.dtype == torch.float64:
        most = torch.full_like(error, FP64_BUDGET)
    else:
        most = _budgets(twin_error, scale, torch.finfo(got.dtype).eps)
    within = error <= most  # not `>`: NaN must not pass
    if bool(within.all()):
        return None
    row = int((~within).int().argmax())
    expected, received = f"<= {float(most[row]):.3g}", f"{float(error[row]):.3g}"
    return Finding(law, f"relative error of row {row} {what}", expected, received)


def _budgets(twin_errors: torch.Tensor, scale: Scale, eps: float) -> torch.Tensor:
    """[rows]"""
    units = (1 + scale.narrow) * eps + scale.wide * torch.finfo(torch.float32).eps
    both = zip(twin_errors.tolist(), units.tolist(), strict=True)
    return twin_errors.new_tensor([budget(twin, eps=unit) for twin, unit in both])


def _errors(got: torch.Tensor, exact: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """[rows] largest finite difference, relative; infinite where NaN is, or something in place of nothing."""
    difference = (got.double() - exact).abs().masked_fill(exact.isinf(), 0).nan_to_num(nan=torch.inf)
    worst = torch.cat([difference, difference.new_zeros(len(got), 1)], 1).amax(1)
    return torch.where(worst == 0, 0, worst / largest)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
