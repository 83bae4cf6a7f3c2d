"""``cpkv show``: a forward drawn as text, as JSON, as a picture."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from properties.catalogued import OF_FORWARDS
from properties.command_line import HOLDS, cpkv, refused
from sim.cases.build import build_case
from sim.picture.anatomy import anatomy
from sim.picture.strip import print_forward


def _row(name: str, output: str) -> list[str]:
    """The cells of a line of the first strip."""
    line = next(line for line in output.splitlines() if line.startswith(f"{name} "))
    return line.split()[1:]


def test_show_draws_the_worked_example() -> None:
    """300 tokens on four ranks, by the contract: units 0 … 4 to ranks 0, 1, 2, 3, 3; the tail has 44 rows."""
    output = cpkv("show", "worked/tokens-300").output
    assert _row("owner", output) == ["0", "1", "2", "3", "3"]
    assert _row("computed", output) == ["0", "1", "2", "3", "3"]
    assert _row("rows", output) == ["64", "64", "64", "64", "44<"]
    assert "write direct: every row is computed by its owner" in output
    assert re.search(r"3 +a\[192:256\] +a\[256:300\] +108 +256 300 +- +2 pages", output)


def test_show_tells_cache_from_new_and_names_what_travels(scenario: Callable[[str], Path]) -> None:
    output = cpkv("show", scenario(HOLDS), "--step", 2).output
    assert "step 1" not in output
    assert _row("from", output) == ["cache", "cache", "both"]
    assert "write gathered: " in output
    assert "padding)" in output
    assert re.search(r"\d+ rows \+\d+", output)


@pytest.mark.parametrize("columns", [80, 50])
@pytest.mark.parametrize("name", ["worked/tokens-1000", "worked/two-requests", "worked/rotation-3"])
def test_show_keeps_to_the_width(name: str, columns: int) -> None:
    result = cpkv("show", name, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    assert max(len(line.rstrip()) for line in result.output.splitlines()[1:]) <= columns


def test_every_forward_of_the_catalogue_can_be_drawn() -> None:
    """And says of each row once who computes it, and of each page once who sends it."""
    console = Console(file=StringIO(), width=80)
    for case in map(build_case, OF_FORWARDS):
        for forward in case.forwards:
            drawn = anatomy(case, forward)
            print_forward(drawn, console)
            rows = sum(rank.rows - rank.padding_rows for rank in drawn.ranks)
            assert rows == sum(request.tokens for request in drawn.requests)
            pages = sum(rank.view_pages for rank in drawn.ranks)
            assert pages == sum(len(request.pages) for request in drawn.requests)


def test_show_prints_json() -> None:
    (forward,) = json.loads(cpkv("show", "worked/tokens-300", "--json").output)
    assert [rank["rows"] for rank in forward["ranks"]] == [64, 64, 64, 108]
    assert [page["owner"] for page in forward["requests"][0]["pages"]] == [0, 1, 2, 3, 3]


def test_show_refuses_a_theme_and_a_step_that_is_not_there() -> None:
    assert "worked/" in refused("show", "worked")
    assert "1 … 1" in refused("show", "worked/tokens-300", "--step", 2)


def test_show_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "strip.png"
    assert cpkv("show", "worked/two-requests", "--png", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "--png" in refused("show", "worked/two-requests", "--png", tmp_path / "strip.nonsense")


def test_a_picture_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "cpkv-testbed[plot]" in refused("show", "worked/tokens-300", "--png", tmp_path / "strip.png")
