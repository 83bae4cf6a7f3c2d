"""How often kernels were called in the place of the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Uses:
    """Counts by operation.

    >>> sum_of([Uses({"rerange": 2}), Uses({"rerange": 1}, {"rerange": 4})])
    Uses(calls={'rerange': 3}, left={'rerange': 4})
    """

    calls: Mapping[str, int] = field(default_factory=dict)  # of the kernel
    left: Mapping[str, int] = field(default_factory=dict)  # to the reference, as the kernel is not for them


NO_USES = Uses()


def sum_of(parts: Iterable[Uses]) -> Uses:
    """Of several ranks or runs."""
    calls, left = Counter[str](), Counter[str]()
    for part in parts:
        calls.update(part.calls)
        left.update(part.left)
    return Uses(dict(calls), dict(left))
