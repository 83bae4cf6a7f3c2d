"""Values between processes as bytes: what pickle carries, and tensors of every dtype and device by value."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from refmodel.errors import InvalidInput, Where
from sim.faults.fault import Fault

# Same width, and old enough for torch's own pickling, which can write the newer dtypes but not read them.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(value: object) -> bytes:
    """The value as bytes, tensors of a GPU as tensors of the CPU.

    Raises whatever its parts raise that cannot be pickled.
    """
    # Not multiprocessing's pickler: it would move the tensors of the sender into shared memory, and send
    # of a GPU's tensor only a handle, which is worth nothing once its process has ended.
    parcel = io.BytesIO()
    _Pickler(parcel, pickle.HIGHEST_PROTOCOL).dump(value)
    return parcel.getvalue()


def unpack(parcel: bytes) -> Any:
    """The value again. Raises what its parts raise, such as ImportError where they are not known."""
    return pickle.loads(parcel)


def pack_case(program: Callable[..., object], args: Sequence[Any], faults: Sequence[Fault]) -> bytes:
    """What a worker runs: the program by its name, tensors by value. InvalidInput if that cannot be sent."""
    try:
        return pack((program, tuple(args), tuple(faults)))
    except Exception as raised:
        parts = {"program": program} | {f"argument {number}": arg for number, arg in enumerate(args)}
        culprits = [what for what, part in parts.items() if not _can_be_packed(part)]
        received = f"{type(raised).__name__}: {raised}"
        raise not_sendable(", ".join(culprits), received, Where()) from raised


def unpack_result(result: bytes, rank: int) -> Any:
    """What a rank returned. InvalidInput if that cannot be had here."""
    try:
        return unpack(result)
    except Exception as raised:
        raise not_sendable("result", f"{type(raised).__name__}: {raised}", Where(rank=rank)) from raised


def not_sendable(what: str, received: str, where: Where) -> InvalidInput:
    """The error that says so."""
    return InvalidInput(
        f"{what} between processes",
        expected="a value that pickle can send and its receiver can import",
        received=received,
        where=where,
        fix="Define programs at the top level of an importable module, without closures; "
        "send and return plain values and tensors.",
    )


def _can_be_packed(part: object) -> bool:
    try:
        pack(part)
    except Exception:
        return False
    return True


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        if value.device.type == "cuda":
            # What is given to the function is packed in its turn, now by the lines below.
            return _itself, (value.detach().cpu().requires_grad_(value.requires_grad),)
        if _is_newer(value.dtype):
            return _retyped, (value.view(_BITS[value.itemsize]), value.dtype)
        return NotImplemented


def _is_newer(dtype: torch.dtype) -> bool:
    return "float8" in str(dtype) or dtype in (torch.uint16, torch.uint32, torch.uint64)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _retyped(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(dtype)
