"""A text with one thing changed."""

from __future__ import annotations


def with_one_change(text: str, old: str, new: str) -> str:
    """What is changed must occur once: otherwise the test is not about what it says."""
    assert text.count(old) == 1
    return text.replace(old, new)
