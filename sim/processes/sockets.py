"""The connections that a group of gloo holds, so that they can be cut: gloo itself has no way to give up.

A thread that waits in a collective for a rank that never comes then gets an error, and can end. Only Linux
tells a process its open files; elsewhere nothing is found, and nothing cut.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_FILES = Path("/proc/self/fd")


@contextmanager
def opened_sockets() -> Iterator[dict[int, str]]:
    """A dictionary which after the block holds the sockets that were opened within it."""
    before = _sockets()
    opened: dict[int, str] = {}
    yield opened
    opened.update(_sockets().items() - before.items())


def cut(sockets: Mapping[int, str]) -> None:
    """End the connections among them, if they are still the same."""
    for descriptor in sockets.items() & _sockets().items():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor[0])) as connection:
            connection.getpeername()  # one that only listens has none, and gloo cannot bear to lose it
            connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Descriptor and identity of each."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for file in list(_FILES.iterdir()):
            with suppress(OSError):
                target = str(file.readlink())
                if target.startswith("socket:"):
                    found[int(file.name)] = target
    return found
