"""The command, called by tests: plain text, whatever the terminal or the CI service."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from sim.cli import app

# A terminal's width and colours, and what a CI service says of itself, are not part of these tests.
PLAIN = dict.fromkeys(("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "CI", "TTY_COMPATIBLE"))


def cpkv(*args: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env=PLAIN | (env or {}), prog_name="cpkv")
