"""``cpkv check``: does a kernel keep the contract?"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from properties.kernels.check import EXAMPLES, LIMIT, Check, Plan
from properties.kernels.flashinfer_bench import export
from properties.kernels.known import read_known
from properties.kernels.listing import print_operations
from properties.kernels.report import print_report
from properties.kernels.speed import speed_table
from properties.kernels.verdicts import Report, Verdict, parse_case, report_of
from properties.kernels.watched import Children
from refmodel.errors import InvalidInput
from refmodel.ops.catalogue import OPS
from sim.gate.record import as_json
from sim.gate.setting import kind_and_size
from sim.kernels.target import known_op
from sim.report.console import open_console, ticking
from sim.report.files import check_writable

MOST_JOBS = 4
_REPORTS = "Reports"


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            help="kernels.py, kernels.py:function, package.module, package.module:function, "
            "or an entry point of the group cpkv.kernels.",
            show_default=False,
        ),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this operation; may be repeated. Of a target with :function: what it is.",
            show_default="all that the target has",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda.", show_default="the GPU if there is one, and it is declared")
    ] = "",
    world: Annotated[
        str, typer.Option(help="Where collectives run, such as nccl:2.", show_default="lockstep")
    ] = "",
    examples: Annotated[
        int, typer.Option(min=0, help="Cases to draw for each operation, besides its corners.")
    ] = EXAMPLES,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds draw other cases.")] = 0,
    case: Annotated[
        str | None, typer.Option(help="Try this one case, in every way that tensors can be handed over.")
    ] = None,
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds that a call may take.")] = LIMIT,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Operations that are tried beside each other; with --time only one.",
            show_default=f"one a core, at most {MOST_JOBS}",
        ),
    ] = None,
    known: Annotated[
        Path | None, typer.Option(help="YAML of failures that are known: op, law, reason.")
    ] = None,
    timed: Annotated[
        bool,
        typer.Option(
            "--time",
            help="Time what passes, on an input that fills a GPU; on a CPU, on its largest corner.",
            rich_help_panel=_REPORTS,
        ),
    ] = False,
    list_only: Annotated[
        bool, typer.Option("--list", help="List the operations, or the contract of --op, and run nothing.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write all that was found there.", rich_help_panel=_REPORTS)
    ] = None,
    export_to: Annotated[
        Path | None,
        typer.Option(
            "--export",
            help="Write failing cases there as a data set of flashinfer-bench.",
            rich_help_panel=_REPORTS,
        ),
    ] = None,
) -> None:
    """Try kernels against the contract of the operations that they are.

    A kernel is a function with the name and the arguments of an operation. It gets poisoned memory, odd
    strides, both kinds of indices, empty and uneven inputs; in a process of its own, so that a crash or a
    hang is one operation's failure. What fails is made small, and said as code to paste and as the line that
    replays it. Exit code 0: all held; 1: some did not, or a known failure passed; 2: nothing can be said.

    **Examples**

    - `cpkv check --list`, and `cpkv check --list --op rerange`: what there is, and what a kernel gets
    - `cpkv check kernels.py`: every operation in the file
    - `cpkv check kernels.py:fast_rerange --op rerange`: a function under a name of its own
    - `cpkv check kernels.py --op sparse_mla --examples 1000 --seed 7`: longer, with other cases
    - `cpkv check my_package.kernels --device cuda --time`
    - `cpkv check kernels.py --known known.yaml --json check.json`: for continuous integration
    - `cpkv check properties.kernels.adversaries.cheats:zeros --op rerange`: one that fails
    """
    if list_only:
        named = [known_op(name, what="--op") for name in op or OPS]
        print_operations(named, open_console())
        return
    _refuse_nonsense(target, device, world, json)
    assert target is not None
    ops = tuple(op or ())
    if case is not None and len(ops) != 1:
        raise InvalidInput("--case", expected="the operation whose case it is", received="none or several",
                           fix="Add --op NAME.")  # fmt: skip
    plan = Plan(
        target=target,
        ops=ops,
        device=device,
        world=world,
        examples=examples,
        seed=seed,
        case=None if case is None else parse_case(known_op(ops[0], what="--op").name, case),
        limit=limit,
        known=read_known(known) if known else (),
        timed=timed,
        jobs=1 if timed else jobs or min(MOST_JOBS, os.cpu_count() or 1),
    )
    raise typer.Exit(_run(plan, open_console(), json, export_to))


def _run(plan: Plan, console: Console, json: Path | None, export_to: Path | None) -> int:
    torch.set_num_threads(1)
    # Interpreted kernels call numpy on small arrays: threads of its BLAS get in each other's way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    start = time.perf_counter()
    with Children(plan.target, plan.op, plan.limit) as children:
        check = Check(plan, children)
        verdicts: list[Verdict] = []
        with ticking(console, len(check.ops)) as tick:
            for verdict in check:
                verdicts.append(verdict)
                tick(f"{verdict.op} {verdict.verdict}")
        printed = children.printed() if plan.case is not None else ""
    report = _report(check, verdicts, time.perf_counter() - start)
    if printed:
        console.print(f"{printed}\n", soft_wrap=True)
    if check.speeds:
        console.print(speed_table(check.speeds))
    print_report(report, console)
    if json is not None:
        json.write_bytes(as_json(report))
    if export_to is not None:
        _export(check, export_to, console)
    return report.exit_code


def _report(check: Check, verdicts: list[Verdict], seconds: float) -> Report:
    plan = check.plan
    return report_of(
        verdicts,
        target=plan.target,
        device=plan.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        seed=plan.seed,
        examples=plan.examples,
        seconds=seconds,
        lacking=check.lacking,
        near_misses=check.near_misses,
        named=bool(plan.ops),
    )


def _export(check: Check, folder: Path, console: Console) -> None:
    written = export(check.failed, folder)
    console.print(f"{len(written.files)} files written below {folder}", soft_wrap=True)
    for sentence in written.left_out:
        console.print(f"left out: {sentence}", soft_wrap=True)


def _refuse_nonsense(target: str | None, device: str, world: str, json: Path | None) -> None:
    if target is None:
        raise InvalidInput(
            "target",
            expected="kernels.py, a module, or an entry point of the group cpkv.kernels",
            received="nothing",
            fix="`cpkv check --list` says which operations there are.",
        )
    if device not in ("", "cpu", "cuda"):
        raise InvalidInput("--device", expected="cpu or cuda", received=device)
    if world:
        kind_and_size(world)
    check_writable(json=json)
