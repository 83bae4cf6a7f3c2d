"""All operations, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from refmodel.ops import attention, collective, host, layout, quantize, storage, topk
from refmodel.ops.op import Op

_ROOMS = (layout, storage, quantize, collective, attention, topk, host)

OPS: Mapping[str, Op] = MappingProxyType(
    {value.name: value for room in _ROOMS for value in vars(room).values() if isinstance(value, Op)}
)
