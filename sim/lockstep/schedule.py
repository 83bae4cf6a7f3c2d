"""Schedules: how the choices of a run are made, and a short token that makes them again.

A choice is between 2 or more things: ranks that can go on, messages that a rank may receive. They are
numbered so that 0 is always the next one in order; a schedule draws the number, and the run notes it.
"""

from __future__ import annotations

import base64
import binascii
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from refmodel.errors import InvalidInput, Where

# The place of the one chosen of these options, ranks in order; counted in a circle from that of the second.
Draw = Callable[[Sequence[int], int], int]


class Schedule(Protocol):
    """A way to make choices; a value, from which every run draws anew."""

    def draw(self, size: int, program: str) -> Draw:
        """The choices of one run of ``program`` on ``size`` ranks."""


@dataclass(frozen=True, slots=True)
class InOrder:
    """Always the next rank: 0, 1, …, and from the last to the first."""

    def draw(self, size: int, program: str) -> Draw:
        return lambda options, first: 0


@dataclass(frozen=True, slots=True)
class Random:
    """Every choice with equal chances."""

    seed: int = 0

    def draw(self, size: int, program: str) -> Draw:
        uniform = random.Random(self.seed).random
        return lambda options, first: int(uniform() * len(options))


@dataclass(frozen=True, slots=True)
class Priorities:
    """Probabilistic concurrency testing (PCT; Burckhardt et al., ASPLOS 2010).

    Ranks have random priorities; the highest that can go on does. At ``depth`` − 1 random ones of the first
    ``steps`` choices the rank about to go on drops below all others. A fault that needs ``depth`` ordering
    constraints is found in one run with a probability of at least 1 / (ranks · steps^(depth − 1)): far
    better than equal chances for one rank that must stay behind, or ahead, for long.
    """

    seed: int = 0
    depth: int = 3
    steps: int = 200

    def __post_init__(self) -> None:
        if self.depth < 1 or self.steps < self.depth:
            raise InvalidInput(
                "schedule of changing priorities",
                expected="1 <= depth <= steps",
                received=f"depth {self.depth}, steps {self.steps}",
            )

    def draw(self, size: int, program: str) -> Draw:
        source = random.Random(self.seed)
        priorities = list(range(self.depth, self.depth + size))
        source.shuffle(priorities)
        changes = dict(zip(source.sample(range(self.steps), self.depth - 1), range(self.depth), strict=False))
        step = -1

        def highest(options: Sequence[int], first: int) -> int:
            nonlocal step
            step += 1
            chosen = max(options, key=priorities.__getitem__)
            if step in changes:
                priorities[chosen] = changes[step]
                chosen = max(options, key=priorities.__getitem__)
            return (options.index(chosen) - first) % len(options)

        return highest


@dataclass(frozen=True, slots=True)
class Replay:
    """The choices that a token holds, whatever drew them."""

    token: str

    def draw(self, size: int, program: str) -> Draw:
        """Raises InvalidInput, here or at a choice, unless the token is of such a run."""
        return _Reader(self.token, size, program)


def in_order() -> Schedule:
    """The next rank each time: the schedule that is easiest to read."""
    return InOrder()


def randomly(seed: int = 0) -> Schedule:
    """Every choice with equal chances: the default."""
    return Random(seed)


def priority_changing(seed: int = 0, *, depth: int = 3, steps: int = 200) -> Schedule:
    """A random order of the ranks that changes at ``depth`` − 1 of the first ``steps`` choices."""
    return Priorities(seed, depth, steps)


def replay(token: str) -> Schedule:
    """Again the choices of the run that gave ``token``, ``Run.schedule``."""
    return Replay(token)


@dataclass(slots=True)
class Choices:
    """What a run has chosen so far: of how many, and which."""

    radices: list[int] = field(default_factory=list)
    digits: list[int] = field(default_factory=list)

    def token(self, size: int, program: str) -> str:
        """As text. Long runs of choices in order take next to no room."""
        words = b"".join(word.to_bytes(_WORD_BYTES, "little") for word in _words(self.radices, self.digits))
        words = words.rstrip(b"\0")
        head = _check(size, program) + len(self.digits).to_bytes(4, "little")
        # Random digits do not compress, in-order ones vanish.
        packed = zlib.compress(words, 9)
        body = b"\1" + packed if len(packed) < len(words) else b"\0" + words
        return base64.urlsafe_b64encode(head + body).decode().rstrip("=")


# Digits are packed until the next might not fit: a reader who meets the same choices knows where a word ends.
_WORD_BYTES = 8
_WORD_LIMIT = 1 << (8 * _WORD_BYTES)


def _words(radices: Sequence[int], digits: Sequence[int]) -> list[int]:
    words = []
    word, weight = 0, 1
    for radix, digit in zip(radices, digits, strict=True):
        if weight * radix > _WORD_LIMIT:
            words.append(word)
            word, weight = 0, 1
        word += digit * weight
        weight *= radix
    if digits:
        words.append(word)
    return words


def _check(size: int, program: str) -> bytes:
    return zlib.crc32(f"{size} {program}".encode()).to_bytes(4, "little")


class _Reader:
    """Reads the digits of a token as the choices come up."""

    def __init__(self, token: str, size: int, program: str) -> None:
        head, self._count, self._words = _parse(token)
        if head != _check(size, program):
            raise _misfit(f"of {program} on {size} ranks", "the token of another program or number of ranks")
        self._read = 0
        self._weight = 1
        self._word = self._words.pop(0) if self._words else 0

    def __call__(self, options: Sequence[int], first: int) -> int:
        radix = len(options)
        if self._weight * radix > _WORD_LIMIT:
            self._end_word()
            self._weight, self._word = 1, self._words.pop(0) if self._words else 0
        self._weight *= radix
        self._word, digit = divmod(self._word, radix)
        self._read += 1
        if self._read > self._count:
            raise _misfit("one for every choice of the run", f"{self._count} choices, and the run has more")
        return digit

    def finish(self) -> None:
        """The run has ended: so must the token."""
        self._end_word()
        if self._read != self._count:
            raise _misfit(
                "no more choices than the run has", f"{self._count} choices for a run with {self._read}"
            )

    def _end_word(self) -> None:
        if self._word:
            raise _misfit("the choices that the run meets", f"others, about choice {self._read}")


def check_finished(draw: Draw) -> None:
    """Raises InvalidInput if ``draw`` replays a token that holds more choices than have come up."""
    if isinstance(draw, _Reader):
        draw.finish()


def _parse(token: str) -> tuple[bytes, int, list[int]]:
    """The check, the number of choices, and the words."""
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        words = zlib.decompress(raw[9:]) if raw[8] else raw[9:]
    except (ValueError, IndexError, binascii.Error, zlib.error):
        raise _misfit("the text of Run.schedule", repr(token)) from None
    places = range(0, len(words), _WORD_BYTES)
    numbers = [int.from_bytes(words[place : place + _WORD_BYTES], "little") for place in places]
    return raw[:4], int.from_bytes(raw[4:8], "little"), numbers


def _misfit(expected: str, received: str) -> InvalidInput:
    return InvalidInput(
        "schedule token",
        expected=expected,
        received=received,
        where=Where(path="schedule"),
        fix="Replay a token with the program, the arguments and the number of ranks that gave it.",
    )
