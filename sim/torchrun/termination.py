"""SIGTERM during a run: the launcher ends this rank, since another has died. It may say who, first."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

# torchrun itself waits 30 s before it kills.
_LAST_WORDS_SECONDS = 8.0


class Termination:
    """Within the block, SIGTERM is noted instead of obeyed; :meth:`end_if_late` obeys it."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0
        self._before: Any = None
        # Elsewhere Python lets nobody handle signals.
        self._possible = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Termination:
        if self._possible:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._possible:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def end_if_late(self) -> None:
        """End the process if it was asked to a while ago."""
        if self.asked and time.monotonic() - self._since > _LAST_WORDS_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._since = True, time.monotonic()
