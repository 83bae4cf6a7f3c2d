"""How long a failure may take to be named."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sim.failures import RetryWarning


@contextmanager
def fails_within(seconds: float, kind: type[Exception], match: str) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block fails so, in time, and not after a retry."""
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RetryWarning)
        with pytest.raises(kind, match=match) as caught:
            yield caught
    assert time.monotonic() - started < seconds
