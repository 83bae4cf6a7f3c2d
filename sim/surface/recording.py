"""How an operation is written into a ledger: as a call, with the place in the program that it comes from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from refmodel.collectives import Call, current_site
from refmodel.errors import InvalidInput, Where
from sim.surface.operations import Operation

# Without the constructor's own frame.
_new: Callable[[type[Call], tuple[Any, ...]], Call] = tuple.__new__


def entry(operation: Operation, sequence: int, group: str, size: int, rank: int) -> Call:
    """The ledger's entry for the operation of a group's method. Raises InvalidInput for mixed devices.

    Every call of every rank passes here: written plainly, for it is much of what a call costs.
    """
    name = current_site()
    sent, received = operation.sent, operation.received
    tensors = sent or received
    shape: tuple[int, ...] = ()
    dtype, num_bytes = "", 0
    if tensors:
        first = tensors[0]
        shape, dtype, num_bytes = first.shape, _NAMES[first.dtype], first.nbytes
        if len(tensors) > 1:
            num_bytes = sum(tensor.nbytes for tensor in tensors)
        if received is not sent or len(sent) > 1:
            device = first.device
            for tensor in received if len(sent) == 1 else (*sent, *received):
                if tensor.device != device:
                    raise _mixed(operation, rank)
    return _new(
        Call,
        (
            sequence,
            # Above this function are at least those that led here: _issue, issue and the group's method.
            line_of(sys._getframe(4)) if name is None else name,
            operation.kind,
            shape,
            dtype,
            group,
            size,
            num_bytes,
            operation.detail,
            len(tensors),
            name is not None,
            operation.is_even,
            operation.is_message,
        ),
    )


class _Names(dict[torch.dtype, str]):
    """ "float32" for ``torch.float32``."""

    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_NAMES = _Names()


# Frames of these modules stand between a program and its group.
_PLUMBING = (
    "torch",
    "sim.surface",
    "sim.lockstep",
    "sim.processes",
    "sim.torchrun",
    "sim.faults",
    "refmodel.collectives",
    "contextlib",
)
# By the id of a code that calls came through: the code, which being kept leaves its id to nobody else; and by
# instruction the lines of it that were named, or None if it is plumbing.
_codes: dict[int, tuple[CodeType, dict[int, str] | None]] = {}


def line_of(frame: FrameType | None) -> str:
    """The line of the innermost frame that is neither torch's nor ours; "somewhere" if there is none."""
    while frame is not None:
        code = frame.f_code
        lines = (_codes.get(id(code)) or _meet(code, frame))[1]
        if lines is not None:
            place = frame.f_lasti
            return lines.get(place) or lines.setdefault(
                place, f"{Path(code.co_filename).name}:{frame.f_lineno}"
            )
        frame = frame.f_back
    return "somewhere"


def _meet(code: CodeType, frame: FrameType) -> tuple[CodeType, dict[int, str] | None]:
    module = frame.f_globals.get("__name__", "")
    is_plumbing = any(module == name or module.startswith(f"{name}.") for name in _PLUMBING)
    return _codes.setdefault(id(code), (code, None if is_plumbing else {}))


def _mixed(operation: Operation, rank: int) -> InvalidInput:
    devices = {str(tensor.device) for tensor in (*operation.sent, *operation.received)}
    return InvalidInput(
        f"tensors of {operation.kind}",
        expected="all on one device",
        received=" and ".join(sorted(devices)),
        where=Where(rank=rank),
    )
