"""Values between processes, as bytes: what pickle can carry, and tensors of every dtype by value."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

# Same width, and old enough for torch's own pickling, which can write the newer dtypes but not read them.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(value: object) -> bytes:
    """The value as bytes. Raises whatever its parts raise that cannot be pickled."""
    # Not multiprocessing's pickler: it would move the tensors of the sender into shared memory.
    parcel = io.BytesIO()
    _Pickler(parcel, pickle.HIGHEST_PROTOCOL).dump(value)
    return parcel.getvalue()


def unpack(parcel: bytes) -> Any:
    """The value again. Raises what its parts raise, such as ImportError where they are not known."""
    return pickle.loads(parcel)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_newer(value.dtype):
            return _retyped, (value.view(_BITS[value.itemsize]), value.dtype)
        return NotImplemented


def _is_newer(dtype: torch.dtype) -> bool:
    return "float8" in str(dtype) or dtype in (torch.uint16, torch.uint32, torch.uint64)


def _retyped(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(dtype)
