"""All cases, by the name of their operation."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isabstract
from types import MappingProxyType

from properties.kernels.cases import layout
from properties.kernels.cases.case import Case

_ROOMS = (layout,)

CASES: Mapping[str, type[Case]] = MappingProxyType(
    {
        value.op.name: value
        for room in _ROOMS
        for value in vars(room).values()
        if isinstance(value, type) and issubclass(value, Case) and not isabstract(value)
    }
)
