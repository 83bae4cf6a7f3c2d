"""Kernels that are wrong on purpose: proof that the cases and judges can tell.

:data:`ADVERSARIES` holds all of them, one module a room of operations.
"""

from properties.kernels.adversaries import (
    attention,
    collective,
    host,
    layout,
    offsets,
    quantize,
    slots,
    storage,
    topk,
    wrapped_rows,
)
from properties.kernels.adversaries.adversary import Adversary, adversaries_of

_ROOMS = (layout, slots, storage, offsets, wrapped_rows, quantize, attention, topk, host, collective)

ADVERSARIES: tuple[Adversary, ...] = tuple(found for room in _ROOMS for found in adversaries_of(room))
