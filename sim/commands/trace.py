"""``cpkv trace``: write a trace of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cases.trace import generate_trace, write_trace
from sim.report.files import check_writable


def trace(
    out: Annotated[Path, typer.Option(help="Where to write it.")],
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same trace.")] = 0,
) -> None:
    """Write a generated request trace: conversations that grow turn by turn behind a shared prompt.

    The format is Mooncake's, one JSON object a line, which `cpkv gate --trace` reads.

    **Examples**

    - `cpkv trace --requests 200 --seed 7 --out trace.jsonl`
    - `cpkv gate --trace trace.jsonl`
    """
    check_writable(out=out)
    generated = generate_trace(requests, seed)
    write_trace(generated, out)
    tokens = sum(request.input_length for request in generated)
    typer.echo(f"{out}: {requests:,} requests, {tokens:,} input tokens, seed {seed}")
