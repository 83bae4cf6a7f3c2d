"""Files of pages in storage: whose they are, and that one which is not sound is a miss (law H3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from refmodel.errors import FallbackWarning
from sim.engine.shelf import Shelf


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with closing(Shelf(rank=1)) as shelf:
        yield shelf


def test_a_file_says_whose_it_is_and_gives_back_what_was_put(shelf: Shelf) -> None:
    shelf.put(0xAB, "kv", b"twelve bytes")
    assert [path.name for path in shelf.folder.iterdir()] == ["00000000000000ab-1-kv.page"]
    assert shelf.get(0xAB, "kv", 12) == b"twelve bytes"
    shelf.put(0xAB, "kv", b"twelve other")
    assert shelf.get(0xAB, "kv", 12) == b"twelve other"


@pytest.mark.parametrize("how", ["lose", "truncate", "corrupt"])
def test_a_file_that_is_not_sound_is_a_miss_with_a_warning(shelf: Shelf, how: str) -> None:
    shelf.put(7, "index", bytes(range(64)))
    shelf.spoil(7, "index", how)
    with pytest.warns(FallbackWarning, match="0000000000000007-1-index.page is a miss"):
        assert shelf.get(7, "index", 64) is None


def test_a_file_under_the_name_of_another_page_is_a_miss(shelf: Shelf) -> None:
    shelf.put(7, "kv", bytes(8))
    shelf.path(7, "kv").rename(shelf.path(8, "kv"))
    with pytest.warns(FallbackWarning, match="its digest is another"):
        assert shelf.get(8, "kv", 8) is None


def test_files_are_gone_with_the_engine() -> None:
    shelf = Shelf(0)
    folder = Path(shelf.folder)
    shelf.put(1, "kv", b"x")
    shelf.close()
    assert not folder.exists()
