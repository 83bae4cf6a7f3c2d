"""One exception family (law X2): every error says what was expected, what came, where, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Where:
    """Place of an error or a finding. Only what is known is set; ``str()`` prints just that."""

    file: str | None = None
    line: int | None = None
    path: str | None = None  # path inside a file or an argument, e.g. "steps[1].extend[0].tokens"
    step: int | None = None
    rank: int | None = None
    request: str | None = None
    layer: int | None = None
    cache: str | None = None
    page: int | None = None  # logical page
    slot: int | None = None  # offset inside the page
    position: int | None = None  # position in the request
    site: str | None = None  # call site of a collective

    def __str__(self) -> str:
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name} {value}" for name, value in named if value is not None)


class CpkvError(Exception):
    """Root of the family.

    >>> print(InvalidInput("page size", expected="an integer >= 1", received=0, where=Where(path="P")))
    page size: expected an integer >= 1, got 0 (path P)
    """

    def __init__(
        self, what: str, *, expected: object, received: object, where: Where | None = None, fix: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.expected = str(expected)
        self.received = str(received)
        self.where = where or Where()
        self.fix = fix

    def __str__(self) -> str:
        place = f" ({self.where})" if str(self.where) else ""
        advice = f". {self.fix}" if self.fix else ""
        return f"{self.what}: expected {self.expected}, got {self.received}{place}{advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries; keyword-only arguments need saying how.
        return _rebuild, (type(self), self.what, self.expected, self.received, self.where, self.fix)


def _rebuild(
    kind: type[CpkvError], what: str, expected: str, received: str, where: Where, fix: str
) -> CpkvError:
    return kind(what, expected=expected, received=received, where=where, fix=fix)


class InvalidInput(CpkvError, ValueError):
    """The caller asked for something that has no meaning; nothing was changed."""


class FallbackWarning(UserWarning):
    """A slower path was taken, by all ranks, for a reason that the message names (laws O5, V6)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where a law broke: a value, so that a run can collect findings and go on."""

    law: str
    what: str
    expected: str
    received: str
    where: Where = Where()

    def __str__(self) -> str:
        return f"{self.law} broke: {self.what}: expected {self.expected}, got {self.received} ({self.where})"
