"""Prompts made of blocks: equal blocks are equal tokens, and nothing of an earlier request is needed."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refmodel.errors import InvalidInput
from sim.engine.tables import Tables
from sim.engine.truth import block_ids, fresh_ids
from sim.histories.history import History, Submit

blocks = st.lists(st.integers(0, 3) | st.integers(0, 2**62), min_size=1, max_size=5)


def empty_tables(**settings: object) -> Tables:
    given_settings: dict[str, object] = {"world_size": 2, "page_size": 4, "pages_per_lane": 16} | settings
    return Tables(History(title="t", why="w", laws=["L4"], history=[], **given_settings))  # type: ignore[arg-type]


@given(blocks, blocks, st.integers(1, 9))
def test_two_prompts_share_exactly_their_leading_blocks(one: list[int], other: list[int], size: int) -> None:
    ids = [block_ids(each, size, len(each) * size) for each in (one, other)]
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    shared = min(len(one), len(other)) if same is None else same
    common = min(len(one), len(other)) * size
    differing = np.flatnonzero(ids[0][:common] != ids[1][:common])
    assert (int(differing[0]) if len(differing) else common) == shared * size


@given(blocks, st.integers(1, 9), st.data())
def test_tokens_cut_the_last_block_and_change_nothing_before_it(
    numbers: list[int], size: int, data: st.DataObject
) -> None:
    whole = block_ids(numbers, size, len(numbers) * size)
    stop = data.draw(st.integers(0, len(whole)))
    assert block_ids(numbers, size, stop).tolist() == whole[:stop].tolist()
    assert len(set(block_ids([numbers[0]], size, size).tolist())) == size
    assert not set(whole.tolist()) & set(fresh_ids(numbers[0] % 100, 0, 64).tolist())


def test_a_prefetch_without_storage_is_refused_and_changes_nothing() -> None:
    tables = empty_tables()
    before = tables.fingerprint()
    with pytest.raises(InvalidInput, match="storage: expected on, got off"):
        tables.admit(Submit("a", 8, blocks=[1], prefetch=True))
    assert (tables.fingerprint(), tables.requests, tables.names) == (before, {}, set())


def test_of_a_request_of_blocks_that_has_left_only_its_name_is_kept() -> None:
    tables = empty_tables()
    tables.admit(Submit("a", 8, blocks=[1]))
    tables.admit(Submit("b", 8))
    tables.abort("a")
    tables.abort("b")
    assert list(tables.seen) == ["b"]
    tables.admit(Submit("c", 6, "b", 5))
    with pytest.raises(InvalidInput, match="got a"):
        tables.admit(Submit("d", 6, "a", 5))
    with pytest.raises(InvalidInput, match="a new name"):
        tables.admit(Submit("a", 8, blocks=[1]))


def test_requests_of_blocks_that_have_left_take_no_memory_but_their_names() -> None:
    def held_after(requests: int) -> int:
        tables = empty_tables(page_size=64, pages_per_lane=64)
        tracemalloc.start()
        for number in range(requests):
            tables.now = number
            tables.admit(Submit(f"line {number}", 4096, blocks=[number] * 8))
            tables.abort(f"line {number}")
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held

    few, many = held_after(20), held_after(40)
    assert many - few < 20 * 512  # bytes; the ids of one request alone are 32 KiB
