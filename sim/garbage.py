"""How often Python looks for cycles, in processes of our own."""

from __future__ import annotations

import gc

# Of new objects, and of rounds before older ones are looked at. A run of ranks makes hundreds of thousands of
# small objects that die by themselves, and few cycles: Python's own 700 cost a quarter of its time.
_THRESHOLDS = (20_000, 10, 10)


def collect_seldom() -> None:
    """Look for cycles seldom from now on, and never again in what is there by now: modules, mostly."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
