"""Rank programs that need a process of their own. A module that is imported fast: each worker does."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from refmodel.collectives import all_gather_rows, device_of


def gather(group: dist.ProcessGroup, site: str) -> None:
    """One all_gather."""
    sent = torch.zeros(1, 1, device=device_of(group))
    all_gather_rows(sent, [1] * group.size(), group=group, site=site)


def who(group: dist.ProcessGroup) -> tuple[int, int]:
    return group.rank(), group.size()


def process_id(group: dist.ProcessGroup) -> int:
    return os.getpid()


def raw_calls(group: dist.ProcessGroup) -> list[float]:
    """As a foreign program calls: no site, no group, a subgroup, asynchronous, messages, objects."""
    rank, size, device = group.rank(), group.size(), device_of(group)
    numbers = torch.full((2,), float(rank), device=device)
    work = dist.all_reduce(numbers, async_op=True)
    assert work is not None
    work.wait()
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.broadcast(numbers, src=1, group=pair)
    if rank == 0:
        dist.send(numbers, dst=1)
    elif rank == 1:
        dist.recv(numbers, src=0)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    dist.barrier()
    return numbers.tolist()


def meets_late(group: dist.ProcessGroup) -> bool:
    """Whether an asynchronous call returns before the other rank has come to it."""
    numbers = torch.ones(4, device=device_of(group))
    if group.rank() == 1:
        time.sleep(0.3)
    started = time.monotonic()
    work = dist.all_reduce(numbers, async_op=True)
    assert work is not None
    returned_at_once = time.monotonic() - started < 0.2
    assert group.rank() == 1 or not work.is_completed()
    work.wait()
    return returned_at_once and numbers.tolist() == [group.size()] * 4


def group_name(group: dist.ProcessGroup) -> str:
    return str(dist.new_group(list(range(group.size()))).group_name)


def random_numbers(group: dist.ProcessGroup) -> list[float]:
    return torch.rand(2).tolist()


def leaves_the_group(group: dist.ProcessGroup) -> int:
    gather(group, "before")
    dist.destroy_process_group()
    return group.rank()


def computes_on(group: dist.ProcessGroup, culprit: int) -> None:
    gather(group, "before")
    while group.rank() == culprit:
        pass
    gather(group, "after")


def sleeps(group: dist.ProcessGroup, culprit: int) -> None:
    gather(group, "before")
    if group.rank() == culprit:
        time.sleep(3600)
    gather(group, "after")


def skips_a_group(group: dist.ProcessGroup) -> None:
    """Rank 1 does not take part in making a group, which is no call."""
    gather(group, "before")
    if group.rank() != 1:
        dist.new_group([0, 1])
    else:
        time.sleep(3600)


def dies(group: dist.ProcessGroup, culprit: int, how: str) -> None:
    gather(group, "before")
    if group.rank() == culprit:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    gather(group, "after")


def aborts(group: dist.ProcessGroup, culprit: int) -> None:
    """As C++ does: a word on the way out, of which Python knows nothing."""
    gather(group, "before")
    if group.rank() == culprit:
        os.write(2, b"terminate called after throwing an instance of my own\n")
        os.abort()
    gather(group, "after")


def makes_others_abort(group: dist.ProcessGroup, culprit: int) -> None:
    """They lose a rank, and end as gloo does where it finds that beneath Python."""
    gather(group, "before")
    if group.rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        gather(group, "after")
    except RuntimeError:
        os.write(2, b"terminate called after throwing an instance of another's\n")
        os.abort()


def speaks(group: dist.ProcessGroup, culprit: int = -1) -> int:
    """In Python, and beneath it; then a culprit fails, if there is one."""
    print(f"rank {group.rank()} in Python", file=sys.stderr)
    os.write(2, f"rank {group.rank()} beneath Python\n".encode())
    gather(group, "said")
    if group.rank() == culprit:
        raise ZeroDivisionError("of my own making")
    return group.rank()


def dies_after(group: dist.ProcessGroup, culprit: int) -> int:
    """The process of the culprit ends while the others still compute, after it has handed over its result."""
    if group.rank() == culprit:
        threading.Timer(0.2, os._exit, [0]).start()
    else:
        time.sleep(1)
    return group.rank()


def raises(group: dist.ProcessGroup, culprit: int) -> None:
    gather(group, "before")
    if group.rank() == culprit:
        raise ZeroDivisionError("of my own making")
    gather(group, "after")


def raises_as_a_network_would(group: dist.ProcessGroup) -> None:
    if group.rank() == 1:
        raise RuntimeError("Connection reset by peer, says the program")
    gather(group, "after")


def diverges(group: dist.ProcessGroup) -> None:
    gather(group, "one" if group.rank() else "other")


def cuts_its_connections(group: dist.ProcessGroup, marker: str) -> int:
    """The network fails under rank 1, unless ``marker`` says that it did before."""
    gather(group, "before")
    if group.rank() == 1:
        with suppress(FileExistsError):
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            cut_connections()
    gather(group, "after")
    return group.rank()


def cut_connections() -> None:
    for file in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as connection:
                if connection.family == socket.AF_INET:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)


def returns_a_lock(group: dist.ProcessGroup) -> object:
    return threading.Lock()


def write_into(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    tensor.fill_(group.rank())


def rows_on_device(group: dist.ProcessGroup, dtype: torch.dtype) -> torch.Tensor:
    rank = group.rank()
    rows = torch.arange(3 * rank, device=device_of(group)).reshape(rank, 3).to(dtype)
    return all_gather_rows(rows, list(range(group.size())), group=group, site="rows")


def device_name(group: dist.ProcessGroup) -> str:
    return f"{device_of(group)}, current {torch.cuda.current_device()}"
