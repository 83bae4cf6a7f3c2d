"""A program on the world that torchrun started, on one machine or on several.

    torchrun --standalone --nproc-per-node 2 examples/started.py
    torchrun --standalone --nproc-per-node 2 examples/started.py --break skip

With ``--break`` the last rank does something wrong, and every rank says what: it skips a call, hangs, dies or
raises. See docs/cluster.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

from refmodel.collectives import all_gather_rows, device_of
from refmodel.errors import CpkvError
from sim.world import World


def gather_uneven(group: dist.ProcessGroup, breaks: str) -> tuple[str, float]:
    """Rank r contributes r + 1 rows; returns this rank's machine, and the sum of all rows."""
    rank, size = group.rank(), group.size()
    counts = [other + 1 for other in range(size)]
    rows = torch.full((rank + 1, 4), float(rank), device=device_of(group))
    total = 0.0
    for step in range(3):
        if step == 1 and rank == size - 1:
            go_wrong(breaks)
            if breaks == "skip":
                continue
        total += float(all_gather_rows(rows, counts, group=group, site=f"step {step}").sum())
    return socket.gethostname(), total


def go_wrong(breaks: str) -> None:
    match breaks:
        case "hang":
            time.sleep(3600)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ZeroDivisionError("of my own making")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--break", dest="breaks", choices=["skip", "hang", "die", "raise"], default="")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    arguments = parser.parse_args()
    rank = os.environ.get("RANK", "?")
    started = time.monotonic()
    try:
        with World.started(timeout=arguments.timeout) as world:
            run = world.execute(gather_uneven, arguments.breaks)
    except CpkvError as error:
        # One write, so that the lines of several ranks do not mix.
        sys.stdout.write(
            f"rank {rank} after {time.monotonic() - started:.1f} s: {type(error).__name__}: {error}\n"
        )
        return 1
    totals = {total for _, total in run.results}
    machines = sorted({machine for machine, _ in run.results})
    sys.stdout.write(
        f"rank {rank} of {world}: {len(run.results)} results, {totals} on {', '.join(machines)}; "
        f"{len(run.ledgers[0])} calls, the same on every rank\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
