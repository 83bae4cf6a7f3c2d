"""The operations of the catalogue in words: what a kernel gets, and what it gives."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refmodel.laws import LAWS
from refmodel.ops.op import Kind, Op


def print_operations(ops: list[Op], console: Console) -> None:
    """One line each; of a single one, all that its contract says."""
    if len(ops) == 1:
        _print_contract(ops[0], console)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("operation", no_wrap=True)
    table.add_column("meaning", ratio=1)
    table.add_column("laws")
    for op in ops:
        table.add_row(op.name, op.meaning, " ".join(op.laws))
    console.print(table)


def _print_contract(op: Op, console: Console) -> None:
    console.print(Text(f"def {op.signature}:", "bold"), soft_wrap=True)
    console.print(op.meaning, soft_wrap=True)
    console.print("\narguments")
    for argument in op.arguments:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in argument.dtypes)
        kind = {Kind.INDEX: "int32 or int64", Kind.INTS: "tuple of ints"}.get(
            argument.kind, argument.kind.value
        )
        facts = [argument.shape, dtypes or kind, "written in place" if argument.written else ""]
        console.print(f"  {argument.name:<16}  {argument.meaning}", soft_wrap=True)
        console.print(f"  {'':<16}  {', '.join(filter(None, facts))}", soft_wrap=True)
    console.print("\nresults" if op.results else "\nno results")
    for result in op.results:
        console.print(f"  {result.name:<16}  {result.meaning}", soft_wrap=True)
        console.print(f"  {'':<16}  {result.shape}", soft_wrap=True)
    console.print(f"\ncompared {op.compared}", soft_wrap=True)
    for law in op.laws:
        console.print(f"  {law:<4} {LAWS[law].statement}", soft_wrap=True)
