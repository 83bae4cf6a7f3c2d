"""Scenarios are found by the names that users give."""

from __future__ import annotations

from pathlib import Path

import pytest

from properties.smallest_scenario import SMALLEST
from refmodel.errors import InvalidInput
from sim.cases.library import find_scenarios


def test_scenarios_are_found_by_theme_name_and_path(tmp_path: Path) -> None:
    (one,) = find_scenarios("worked/tokens-100")
    assert find_scenarios("worked/tokens-100.yaml") == [one]
    assert one in find_scenarios("worked")
    mine = tmp_path / "deeper" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text(SMALLEST, encoding="utf-8")
    assert [s.file for s in find_scenarios(str(tmp_path))] == [str(mine)]
    assert find_scenarios(str(mine)) == find_scenarios(str(tmp_path))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="got wrked/tokens-100"):
        find_scenarios("wrked/tokens-100")
