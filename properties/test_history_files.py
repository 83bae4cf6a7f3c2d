"""A history and its file say the same, and the page of histories all that they can say."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from properties.catalogued import HISTORIES, history_named
from properties.smallest_history import parsed
from sim.cases.library import parse_scenario, theme_of
from sim.histories.history import OPERATIONS, History
from sim.histories.writing import history_file


@pytest.mark.parametrize("theme", ["lanes", "radix", "chunks", "admission"])
def test_a_history_is_what_its_file_says_written_anew(theme: str) -> None:
    for history in HISTORIES:
        if theme_of(history) == theme:
            assert parse_scenario(history_file(history), history.file) == history


def test_the_page_of_histories_names_every_key_and_operation() -> None:
    page = Path(__file__).parent.parent / "docs" / "histories.md"
    if not page.exists():
        pytest.skip("the documentation is not part of the installed package")
    text = page.read_text(encoding="utf-8")
    keys = [field.encode_name for field in msgspec.structs.fields(History) if field.name != "file"]
    assert [key for key in keys if f"`{key}`" not in text] == []
    assert [name for name in OPERATIONS if f"| `{name}: " not in text] == []
    (example,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert history_named("radix/shared-tail-is-copied").history[:6] == parsed(example).history
