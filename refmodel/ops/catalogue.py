"""All operations, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from refmodel.ops import layout
from refmodel.ops.op import Op

_ROOMS = (layout,)

OPS: Mapping[str, Op] = MappingProxyType(
    {value.name: value for room in _ROOMS for value in vars(room).values() if isinstance(value, Op)}
)
