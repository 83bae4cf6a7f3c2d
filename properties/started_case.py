"""What ``test_torchrun`` lets torchrun start: programs on the world that was started, one report each.

    torchrun … -m properties.started_case TIMEOUT CASE …

A case is the name of a program of ``process_programs`` and its arguments, "raises,1".
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from properties import process_programs
from sim.failures import RunFailed
from sim.world import World


def main() -> int:
    timeout, *cases = sys.argv[1:]
    rank = os.environ["RANK"]
    failed = False
    # "@0" behind a case: rank 0 runs another program instead.
    with World.parse("torchrun") if timeout == "-" else World.started(timeout=float(timeout)) as world:
        for case in cases:
            name, *args = case.split(",")
            if name.endswith("@0"):
                name = "who" if rank == "0" else name.removesuffix("@0")
            program = getattr(process_programs, name)
            started = time.monotonic()
            report: dict[str, Any] = {"rank": int(rank), "case": case}
            try:
                run = world.execute(program, *(int(arg) if arg.isdigit() else arg for arg in args))
                report |= {
                    "results": run.results,
                    "calls": [[call.kind for call in ledger] for ledger in run.ledgers],
                    "spans": [len(spans) for spans in run.spans],
                }
            except (RunFailed, ValueError) as failure:
                failed = True
                report |= {"failure": type(failure).__name__, "text": str(failure)}
            # One write, so that the lines of several ranks do not mix.
            sys.stdout.write(json.dumps(report | {"seconds": time.monotonic() - started}) + "\n")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
