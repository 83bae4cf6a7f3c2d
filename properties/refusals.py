"""What the error says where something is refused."""

from __future__ import annotations

from collections.abc import Callable

from refmodel.errors import CpkvError


def refusal(act: Callable[..., object], *args: object) -> str:
    """What the error says when that is refused; "" when it is not."""
    try:
        act(*args)
    except CpkvError as error:
        return str(error)
    return ""
