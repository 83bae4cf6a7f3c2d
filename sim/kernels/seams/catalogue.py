"""All seams, by operation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sim.kernels.seams import attention, collective, layout, storage
from sim.kernels.seams.seam import Seam

_ROOMS = (layout, storage, attention, collective)
_ALL = [value for room in _ROOMS for value in vars(room).values() if isinstance(value, Seam)]

SEAMS: Mapping[str, tuple[Seam, ...]] = MappingProxyType(
    {op: tuple(seam for seam in _ALL if seam.op == op) for op in dict.fromkeys(seam.op for seam in _ALL)}
)
