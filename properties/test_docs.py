"""The documentation says what the code says. (Its examples run as doctests.)"""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from properties.kernels.faults import STATEMENTS
from refmodel.laws import LAWS
from refmodel.ops.catalogue import OPS
from refmodel.ops.declare import Capabilities

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_laws_states_each_law_as_the_registry_does() -> None:
    page = DOCS / "laws.md"
    if not page.exists():
        pytest.skip("the documentation is not part of the installed package")
    sections = re.split(r"^### (\S+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    stated = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(stated) == list(LAWS)
    for law_id, text in stated.items():
        statement = text.partition("\n\n")[0].replace("\n", " ")
        assert statement == LAWS[law_id].statement
        assert ">>>" in text, f"{law_id} has no worked number"


@pytest.mark.parametrize("law_id", LAWS)
def test_the_home_of_a_law_exists_and_names_it(law_id: str) -> None:
    home = import_module(LAWS[law_id].home)
    source = Path(str(home.__file__)).read_text(encoding="utf-8")
    family, number = law_id[0], int(law_id[1:])
    ranges = re.findall(rf"{family}(\d+)–{family}(\d+)", source)
    in_range = any(int(first) <= number <= int(last) for first, last in ranges)
    assert in_range or re.search(rf"\b{law_id}\b", source), f"{LAWS[law_id].home} does not name {law_id}"


def test_the_page_of_kernels_has_every_operation_and_every_kind_of_failure() -> None:
    page = DOCS / "kernels.md"
    if not page.exists():
        pytest.skip("the documentation is not part of the installed package")
    text = page.read_text(encoding="utf-8")
    for op in OPS.values():
        assert f"| `{op.signature}` | {op.meaning} | {op.compared} | {' '.join(op.laws)} |" in text
    for kind, statement in STATEMENTS.items():
        assert f"| `{kind}` | {statement} |" in text
    for field in fields(Capabilities):
        assert f"| `{field.name}` |" in text
