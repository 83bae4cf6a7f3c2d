"""Pages, extents, tails and coverage.

Two numbers, never one: *valid* tokens are real; *coverage* is how many slots their pages occupy.

>>> num_pages(300, 64), coverage(300, 64), tail(300, 64)
(5, 320, 44)
>>> Extent(prefix=70, tokens=300).page_positions(64)
range(1, 6)
"""

from __future__ import annotations

from dataclasses import dataclass

from refmodel.errors import InvalidInput, Where


def at_least(minimum: int, value: int, what: str) -> int:
    """``value`` if it is an integer >= ``minimum``; else :class:`InvalidInput` naming ``what``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidInput(what, expected=f"an integer >= {minimum}", received=repr(value))
    return value


def ceil_div(a: int, b: int) -> int:
    """Integer ceiling of a / b."""
    return -(-a // b)


def num_pages(valid: int, page_size: int) -> int:
    """Pages that ``valid`` tokens occupy."""
    return ceil_div(valid, page_size)


def coverage(valid: int, page_size: int) -> int:
    """Slots that the pages of ``valid`` tokens occupy."""
    return num_pages(valid, page_size) * page_size


def tail(valid: int, page_size: int) -> int:
    """Valid tokens in the tail page; 0 when the last page is full."""
    return valid % page_size


@dataclass(frozen=True, slots=True)
class Extent:
    """The tokens that one forward pass extends: positions [prefix, prefix + tokens) of one request."""

    prefix: int  # tokens already in cache, >= 0
    tokens: int  # new tokens, >= 1

    def __post_init__(self) -> None:
        at_least(0, self.prefix, "prefix of an extent")
        at_least(1, self.tokens, "tokens of an extent")

    @property
    def end(self) -> int:
        """Valid tokens after the pass."""
        return self.prefix + self.tokens

    def page_positions(self, page_size: int) -> range:
        """Absolute page positions the extent touches: the page units of S2."""
        return range(self.prefix // page_size, num_pages(self.end, page_size))


@dataclass(frozen=True, slots=True)
class Grid:
    """The two sizes everything is counted in."""

    world_size: int  # W, ranks of the CP group, >= 1
    page_size: int  # P, slots a page, >= 1

    def __post_init__(self) -> None:
        at_least(1, self.world_size, "world size W")
        at_least(1, self.page_size, "page size P")


def check_in_range(value: int, stop: int, what: str, where: Where) -> None:
    """:class:`InvalidInput` unless 0 <= value < stop."""
    if not 0 <= value < stop:
        raise InvalidInput(what, expected=f"0 … {stop - 1}", received=value, where=where)
