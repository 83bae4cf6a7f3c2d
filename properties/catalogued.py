"""Histories of the catalogue by name, read once."""

from __future__ import annotations

from functools import cache

from sim.cases.library import catalogue
from sim.histories.history import History


@cache
def _by_name() -> dict[str, History]:
    return {each.file.removesuffix(".yaml"): each for each in catalogue() if isinstance(each, History)}


def history_named(name: str) -> History:
    """E.g. ``radix/pairs-by-pages``."""
    return _by_name()[name]
