"""The command, called by tests: plain text, whatever the terminal or the CI service."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from sim.cli import app

# A terminal's width and colours, and what a CI service says of itself, are not part of these tests.
PLAIN = dict.fromkeys(("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "CI", "TTY_COMPATIBLE"))

HOLDS = """
title: A short prompt, and its next turn
why: Nothing is wrong with it.
laws: [V1]
world_size: 2
page_size: 16
steps:
  - extend: [{request: a, tokens: 40}]
    expect: {new_pages: [1, 2]}
  - extend: [{request: a, tokens: 5}, {request: b, tokens: 3, prefix: 20}]
    padding: 3
"""


def cpkv(*args: object, env: dict[str, str] | None = None) -> Result:
    """Run it in this process, as if typed."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env=PLAIN | (env or {}), prog_name="cpkv")


def refused(*args: object) -> str:
    """What is said to input that makes no sense."""
    result = cpkv(*args)
    assert result.exit_code == 2
    return result.output
