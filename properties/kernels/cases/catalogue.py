"""All cases, by the name of their operation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from properties.kernels.cases import attention, collective, host, layout, quantize, slots, storage, topk
from properties.kernels.cases.case import Case

_ROOMS = (layout, slots, storage, quantize, collective, attention, topk, host)

CASES: Mapping[str, type[Case]] = MappingProxyType(
    {
        value.op.name: value
        for room in _ROOMS
        for value in vars(room).values()
        if isinstance(value, type) and issubclass(value, Case) and hasattr(value, "op")
    }
)
