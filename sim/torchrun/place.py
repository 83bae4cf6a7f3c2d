"""Where in a started world this process is, from the environment that the launcher gave it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass

import torch
import torch.distributed as dist

from refmodel.errors import InvalidInput, Where
from sim.failures import WorldUnavailable
from sim.machine import missing_for_nccl

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a world that something else has started."""

    rank: int
    size: int
    backend: str  # "gloo" or "nccl"
    device: torch.device | None  # its GPU, with NCCL


def find_place(backend: str | None) -> Place:
    """This process's place. InvalidInput if the environment or ``backend`` makes no sense."""
    size = _number("WORLD_SIZE", 1, None)
    rank = _number("RANK", 0, size - 1)
    gpus = 0 if missing_for_nccl() else torch.cuda.device_count()
    local_size = _number("LOCAL_WORLD_SIZE", 1, None, default=size)
    if backend is None:
        backend = "nccl" if gpus >= local_size else "gloo"
    if backend == "gloo":
        if not dist.is_gloo_available():
            raise WorldUnavailable("gloo under torchrun", expected="torch with gloo", received="none")
        return Place(rank, size, backend, None)
    if backend != "nccl":
        raise InvalidInput("backend", expected='"gloo" or "nccl"', received=repr(backend))
    if gpus < local_size:
        raise WorldUnavailable(
            "nccl under torchrun",
            expected=f"{local_size} GPUs on this machine, one a rank",
            received=missing_for_nccl() or f"{gpus} GPU{'' if gpus == 1 else 's'}",
            where=Where(rank=rank),
            fix="Start fewer processes on a machine, or use gloo.",
        )
    local_rank = _number("LOCAL_RANK", 0, gpus - 1, default=rank % gpus)
    return Place(rank, size, backend, torch.device("cuda", local_rank))


def interface_towards(host: str) -> str | None:
    """The network interface by which this machine reaches ``host``; None if there is no saying.

    gloo would take that of this machine's own name, which may lead nowhere.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            mine = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == mine:
                    return name
    except OSError:
        pass
    return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None  # it has none
    return socket.inet_ntoa(answer[20:24])


def _number(name: str, least: int, most: int | None, default: int | None = None) -> int:
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (most is not None and number > most):
        raise InvalidInput(
            f"environment variable {name}",
            expected=f"an integer >= {least}" if most is None else f"an integer from {least} to {most}",
            received=repr(text),
            fix="torchrun sets it.",
        )
    return number
