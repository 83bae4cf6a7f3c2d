"""Tensors in a file of the safetensors format: eight bytes of length, a header in JSON, and the bytes.

The format is small, and cpkv only writes it; reading needs nothing of ours.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from refmodel.errors import InvalidInput
from refmodel.storage.codecs import as_bytes

ALIGNMENT = 8  # of the header's end: readers map the file and look at it in place

DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, by name, of any shape with a dim. :class:`InvalidInput` for a type the format lacks."""
    header: dict[str, dict[str, object]] = {}
    parts: list[bytes] = []
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise InvalidInput(f"dtype of {name}", expected=f"one of {allowed}", received=tensor.dtype)
        part = as_bytes(tensor.detach().cpu()).numpy().tobytes()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(part)],
        }
        parts.append(part)
        at += len(part)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
