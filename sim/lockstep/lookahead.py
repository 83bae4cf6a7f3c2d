"""One step beyond a divergence: what would the odd rank have called next?

A rank that skipped a call and one that swapped two look the same when the others meet it. So the odd rank
alone goes on, with zeros in place of what it should have received, until it calls again or its program ends.
The run has failed already; this only finds the words for it, and takes a second at most.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_LONGEST_SECONDS = 1.0


def bound_this_thread(give_up: Callable[[], BaseException]) -> None:
    """Raise ``give_up()`` in the program of this thread, should it compute on for longer than a second.

    With a trace function, which runs in the thread itself: an exception sent from another thread could
    strike after the program, in what ends its rank.
    """
    until = time.monotonic() + _LONGEST_SECONDS

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > until:
            unbound_this_thread()
            raise give_up()
        return trace

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(trace)


def unbound_this_thread() -> None:
    """Let this thread take its time again."""
    sys.settrace(None)
