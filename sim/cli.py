"""The command ``cpkv``: a table of commands, each in a room of its own that is entered when it is called."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from refmodel.errors import InvalidInput
from sim.garbage import collect_seldom

GROUP = "cpkv.commands"
DISTRIBUTION = "cpkv-testbed"

# torch takes its time to import: `cpkv --version` need not wait for it.
_OWN = {
    "gate": "sim.commands.gate:gate",
    "show": "sim.commands.show:show",
    "trace": "sim.commands.trace:trace",
    "worlds": "sim.commands.worlds:worlds",
}


def commands() -> dict[str, EntryPoint]:
    """Every command by name: our own, then those that other packages add to the group ``cpkv.commands``."""
    own = {name: EntryPoint(name, value, GROUP) for name, value in _OWN.items()}
    return own | {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in own}


class Program(TyperGroup):
    """Loads a command when it is asked for, and turns what the user got wrong into one message."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = commands().get(cmd_name)
        return None if entry is None else _load(entry)

    def invoke(self, ctx: Any) -> Any:
        from sim.failures import WorldUnavailable  # imports torch; a name here would cost every start

        collect_seldom()
        try:
            return super().invoke(ctx)
        except (InvalidInput, WorldUnavailable) as error:
            typer.echo(f"cpkv: {error}", err=True)
            raise typer.Exit(2) from error


def _load(entry: EntryPoint) -> Any:
    try:
        function = entry.load()
    except (ImportError, AttributeError) as error:
        # One broken add-on must not take the other commands with it.
        typer.echo(f"cpkv: command {entry.name} ({entry.value}) cannot be loaded: {error}", err=True)
        return None
    command = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    command.command(entry.name)(function)
    return typer.main.get_command(command)


app = typer.Typer(
    cls=Program, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cpkv {version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Correctness gate for context-parallel shared KV caches."""


def main() -> None:
    """The console script."""
    app(prog_name="cpkv")
