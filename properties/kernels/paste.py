"""A failing call as code that one can paste."""

from __future__ import annotations

from properties.kernels.cases.case import Case
from properties.kernels.handling import PLAIN, Handling


def code_of(case: Case, handling: Handling, target: str) -> str:
    """Python that hands the arguments over as it was done, and prints what came back, and what is right."""
    kind, op = type(case), case.op
    lines = [
        f"from {kind.__module__} import {kind.__qualname__}",
        "from sim.kernels.target import load_target",
        "",
        f"case = {case!r}",
        f'kernel = load_target({target!r}, "{op.name}").candidates["{op.name}"].function',
    ]
    if op.collective:
        lines.append("# On each rank of a world: kernel(**case.arguments_of(rank), group=group)")
        return "\n".join(lines)
    made = "case.arguments()"
    if handling != PLAIN:
        lines[1:1] = [
            "from properties.kernels.guarded import handed_over",
            f"from {Handling.__module__} import Handling, Views",
        ]
        made = f"handed_over(case.op, case.arguments(), {handling.code})"
    lines += [
        f"arguments, right = {made}, case.arguments()",
        "print('received', kernel(**arguments)" + _outcome("arguments", op.written, out=handling.out) + ")",
        "print('expected', case.op.reference(**right)" + _outcome("right", op.written) + ")",
    ]
    return "\n".join(lines)


def _outcome(arguments: str, written: tuple[str, ...], *, out: bool = False) -> str:
    """What else to print: the tensors that were written to."""
    names = (*written, *(("out",) if out else ()))
    return "".join(f', {arguments}["{name}"]' for name in names)
