"""Numbers drawn one by one, and what is chosen by them.

A strategy made anew for each step costs more than the step; a number does not. The least number is always the
plainest choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


@cache
def _below(stop: int) -> st.SearchStrategy[int]:
    return st.integers(0, stop - 1)


class Choices:
    """What is drawn for one example. ``number`` gives one of 0 … n − 1, for n > 1."""

    def __init__(self, number: Callable[[int], int]) -> None:
        self._number = number

    @classmethod
    def aimed(cls, draw: st.DrawFn) -> Choices:
        """Each number by Hypothesis: it varies some of them to get more of what it is told to aim at.

        So most examples are variations of others.
        """
        return cls(lambda stop: draw(_below(stop)))

    @classmethod
    def free(cls, draw: st.DrawFn) -> Choices:
        """All numbers from one that Hypothesis draws: examples are alike by chance only."""
        return cls(Random(draw(st.binary(min_size=8, max_size=8))).randrange)

    def below(self, stop: int) -> int:
        """0 … stop − 1."""
        return self._number(stop) if stop > 1 else 0

    def between(self, first: int, last: int) -> int:
        """first … last."""
        return first + self.below(last - first + 1)

    def once_in(self, times: int) -> bool:
        return self.below(times) == times - 1

    def of(self, values: Sequence[T]) -> T:
        """One of them; the first is the plainest."""
        return values[self.below(len(values))]

    def some(self, values: Sequence[T], most: int = 3) -> list[T]:
        """All of them half of the time, else up to ``most``, each once."""
        if len(values) == 1 or not self.below(2):
            return list(values)
        left, chosen = list(values), []
        for _ in range(self.between(1, min(most, len(values)))):
            chosen.append(left.pop(self.below(len(left))))
        return chosen

    def weighted(self, weights: dict[T, int]) -> T:
        """One of the keys, each as often as its weight says."""
        number = self.below(sum(weights.values()))
        for value, weight in weights.items():
            number -= weight
            if number < 0:
                return value
        raise AssertionError(weights)
