"""The type that attention computes in (laws A1, A4, A6).

Rows are stored in few bits and converted when they are used. Logits, outputs and lse stay in the accumulating
type; who wants fewer bits rounds once, at the end. Were partial outputs of ranks rounded before they are
merged, the error would grow with the number of ranks.

>>> accumulating_type(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1))
torch.float32
"""

from __future__ import annotations

import torch


def accumulating_type(*tensors: torch.Tensor) -> torch.dtype:
    """float64 if one of the tensors is, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
