"""How a quantizer is judged: by what the law asks of elements and scales, not by the bytes of one quantizer.

Right kernels differ. One divides by the scale, another multiplies with its reciprocal, a third takes the
reciprocal of 448 first: each rounds in fp32 once more or once less. So a scale may be two fp32 units from
max(amax, 1e-4) / 448, and an element must be a nearest fp8 to its value over the *received* scale, of which
two fp32 units either way are as good (law F1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from refmodel.attention.chunks import row_chunks
from refmodel.errors import Finding
from refmodel.ops.judges import CHUNK_ELEMENTS
from refmodel.ops.op import Arguments, Judge, Results
from refmodel.storage.codecs import FP8, FP8_MAX, LEAST_AMAX

UNITS = 2  # of fp32: one for the rounding of a scale or a quotient, one for that of a reciprocal
_UNIT = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Values and what became of them, tile by tile."""

    values: torch.Tensor  # [n, tiles, tile]
    elements: torch.Tensor  # uint8 [n, tiles, tile], fp8 bytes
    scales: torch.Tensor  # fp32 [n, tiles]
    plain: torch.Tensor  # uint8 [n, bytes] what is stored without a scale
    plain_values: torch.Tensor  # uint8 [n, bytes] its correctly rounded bytes

    def of(self, rows: slice) -> Quantized:
        """Some rows."""
        return Quantized(*(getattr(self, field.name)[rows] for field in fields(self)))


def within_rounding(taken: Callable[[Arguments, Results], Quantized]) -> Judge:
    """F1 of what ``taken`` finds in arguments and results."""

    def judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
        quantized = taken(arguments, received)
        tiles = quantized.values
        for rows in row_chunks(len(tiles), elements_a_row=tiles[:1].numel(), chunk_elements=CHUNK_ELEMENTS):
            for fault in (_scale_fault, _element_fault, _plain_fault):
                if (finding := fault(quantized.of(rows), rows.start)) is not None:
                    return finding
        return None

    return judge


def _scale_fault(quantized: Quantized, first_row: int) -> Finding | None:
    amax = quantized.values.double().abs().amax(-1).clamp(min=LEAST_AMAX)
    exact, scales = amax / FP8_MAX, quantized.scales.double()
    off = ~((scales - exact).abs() <= UNITS * _UNIT * exact)  # not `>`: NaN must not pass
    if not bool(off.any()):
        return None
    row, tile = off.nonzero()[0].tolist()
    wanted = f"{float(exact[row, tile]):.9g}, give or take {UNITS} units of fp32"
    place = f"scale of tile {tile} of row {first_row + row}"
    return Finding("F1", place, wanted, f"{float(scales[row, tile]):.9g}")


def _element_fault(quantized: Quantized, first_row: int) -> Finding | None:
    elements = quantized.elements.view(FP8).double()
    exact = quantized.values.double() / quantized.scales.double()[..., None]
    slack = UNITS * _UNIT * exact.abs()
    lowest, highest = _nearest(exact - slack), _nearest(exact + slack)
    off = ~((elements >= lowest) & (elements <= highest))
    if not bool(off.any()):
        return None
    row, tile, column = off.nonzero()[0].tolist()
    place = f"element {column} of tile {tile} of row {first_row + row}"
    wanted = f"{float(lowest[row, tile, column])}, nearest to {float(exact[row, tile, column]):.9g}"
    return Finding("F1", place, wanted, str(float(elements[row, tile, column])))


def _plain_fault(quantized: Quantized, first_row: int) -> Finding | None:
    off = quantized.plain != quantized.plain_values
    if not bool(off.any()):
        return None
    row, byte = off.nonzero()[0].tolist()
    right, got = int(quantized.plain_values[row, byte]), int(quantized.plain[row, byte])
    place = f"byte {byte} of the rope part of row {first_row + row}"
    return Finding("F1", place, f"0x{right:02x}", f"0x{got:02x}")


def _nearest(exact: torch.Tensor) -> torch.Tensor:
    """The nearest fp8 value in float64; of two equally near ones, the even one.

    Spaced by 2⁻³ of the leading bit, by 2⁻⁹ at least: rounding on that grid is exact in float64, where a cast
    by way of fp32 would round twice.
    """
    bounded = exact.clamp(-FP8_MAX, FP8_MAX)
    exponent = torch.frexp(bounded).exponent.clamp(min=-5) - 1
    spacing = torch.ldexp(torch.ones_like(bounded), exponent - 3)
    return torch.round(bounded / spacing) * spacing
