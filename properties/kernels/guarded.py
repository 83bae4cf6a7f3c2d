"""Tensors with guards around them: whatever is written where nothing is to be written shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from properties.kernels.handling import Handling, Views
from refmodel.ops.op import Arguments, Op

_LEAST_GUARD = 1024  # bytes
_MOST_GUARD = 1 << 16
_ALIGNMENT = 512  # bytes, of the plain view: as allocators give it

# Poison is of two kinds, 0 and 1: what is by chance a right result in one is not in the other.


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor in a buffer of its own."""

    view: torch.Tensor
    buffer: torch.Tensor  # uint8: guard, tensor, guard
    before: torch.Tensor  # the buffer as it was
    first: int  # byte of the buffer where the view's storage begins

    def fill(self, values: torch.Tensor) -> None:
        """Give the view these values."""
        self.view.copy_(values)
        self.before.copy_(self.buffer)

    @property
    def changed(self) -> bool:
        """Whether any byte is another, in the tensor or around it."""
        return not torch.equal(self.buffer, self.before)

    def strays(self) -> list[int]:
        """Bytes around the elements that were written: their distances from the first element, in bytes."""
        after = self.buffer.clone()
        self._same_view(after).copy_(self._same_view(self.before))
        return [int(place) - self.first for place in (after != self.before).nonzero()[:, 0][:3]]

    def _same_view(self, buffer: torch.Tensor) -> torch.Tensor:
        first = self.first // self.view.element_size()
        return buffer.view(self.view.dtype).as_strided(self.view.shape, self.view.stride(), first)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this buffer."""
        if not tensor.numel() or tensor.device != self.buffer.device:
            return False
        return 0 <= tensor.data_ptr() - self.buffer.data_ptr() < self.buffer.numel()


def guarded(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    views: Views,
    *,
    poison: int,
    finite: bool = False,
    device: str = "cpu",
) -> Guarded:
    """Memory for a tensor, with poison in it and around it."""
    stride = _strides(shape, views)
    itemsize = torch.empty(0, dtype=dtype).element_size()
    row = max(1, stride[0] if shape else 1) * itemsize
    spans = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0
    guard = _up(min(max(2 * row, _LEAST_GUARD), _MOST_GUARD), _ALIGNMENT)
    first = guard + (row if views is Views.OFFSET else 0)
    total = _up(first + spans * itemsize, _ALIGNMENT) + guard
    first -= first % itemsize
    buffer = torch.empty(total + _ALIGNMENT, dtype=torch.uint8, device=device)
    shift = -buffer.data_ptr() % _ALIGNMENT
    buffer = buffer[shift : shift + total]
    stain(buffer.view(dtype), poison, finite=finite)
    view = buffer[first:].view(dtype).as_strided(shape, stride, (shift + first) // itemsize)
    return Guarded(view, buffer, buffer.clone(), first)


def memory_for(
    arguments: Arguments, handling: Handling, *, poison: int = 0, device: str = "cpu"
) -> dict[str, Guarded]:
    """Guarded memory for each tensor among the arguments, by name."""
    return {
        name: guarded(
            tuple(value.shape),
            value.dtype,
            handling.views,
            poison=poison,
            finite=handling.finite,
            device=device,
        )
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
    }


def room_for(
    op: Op, arguments: Arguments, handling: Handling, *, poison: int = 0, device: str = "cpu"
) -> tuple[Guarded, ...]:
    """Guarded memory for the results."""
    return tuple(
        guarded(space.shape, space.dtype, handling.views, poison=poison, device=device)
        for space in op.spaces(**arguments)
    )


def filled(memory: Mapping[str, Guarded], arguments: Arguments) -> dict[str, Any]:
    """The arguments, with tensors in this memory."""
    for name, place in memory.items():
        place.fill(arguments[name])
    return {name: memory[name].view if name in memory else value for name, value in arguments.items()}


def handed_over(op: Op, arguments: dict[str, Any], handling: Handling) -> dict[str, Any]:
    """The arguments of a case as a kernel gets them, ``out`` among them if there is to be one."""
    values = handling.values(op, arguments)
    given = filled(memory_for(values, handling), values)
    if handling.out:
        out = tuple(one.view for one in room_for(op, values, handling))
        given["out"] = out[0] if len(out) == 1 else out
    return given


def _strides(shape: tuple[int, ...], views: Views) -> tuple[int, ...]:
    """In elements. Strided: every second element, and rows farther apart than that needs."""
    strides: list[int] = []
    step = 2 if views is Views.STRIDED else 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
        if views is Views.STRIDED:
            step += 4
    return tuple(reversed(strides))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def stain(tensor: torch.Tensor, poison: int, *, finite: bool = False) -> None:
    """Fill a tensor with what no right result is: NaN if it can be, or large numbers."""
    if tensor.dtype is torch.bool:
        tensor.fill_(not poison)
    elif tensor.dtype is torch.uint8:
        tensor.fill_((0xA5, 0x5B)[poison])
    elif tensor.is_floating_point():
        large = 2.0**6 if tensor.element_size() == 1 else 2.0**14
        tensor.fill_(-large if poison else large if finite else float("nan"))
    else:
        most = torch.iinfo(tensor.dtype).max
        tensor.fill_((most // 3, most // 5)[poison])
