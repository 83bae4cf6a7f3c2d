"""Law H3: how far a prefix is in the host cache or in storage, with every cache of every page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.host_copies import LAYERS, filled, host_of
from properties.proofs import proves
from refmodel.errors import InvalidInput
from refmodel.serving.stored_prefix import own_prefix


@proves("H3")
@given(st.lists(st.integers(0, 5), min_size=len(LAYERS), max_size=len(LAYERS)), st.integers(1, 3))
def test_a_partial_prefetch_ends_at_the_first_page_that_lacks_a_cache(
    arrived: list[int], world_size: int
) -> None:
    keys = [70, 71, 72, 73, 74]
    host = host_of(world_size, pages_per_lane=5)
    fill = host.plan_prefetch(keys, [i % world_size for i in range(5)], now=0)
    for cache, pages in zip(LAYERS, arrived, strict=True):
        host.arrived(fill, cache, pages)
    assert host.usable_prefix(keys) == min(arrived)
    assert host.close(fill) == tuple(keys[min(arrived) :])
    assert [key in host for key in keys] == [i < min(arrived) for i in range(5)]


@proves("H3", "H4")
@given(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4))
def test_what_storage_brings_behind_the_host_prefix_lies_behind_it(
    world_size: int, held: int, brought: int
) -> None:
    keys = [70 + i for i in range(held + brought)]
    lanes = [i % world_size for i in range(len(keys))]
    host = host_of(world_size, pages_per_lane=8)
    filled(host, keys[:held], lanes[:held])
    fill = filled(host, keys, lanes)
    memory = {(move.lane, move.host_page): keys[move.position] for move in fill.moves}  # as storage has them
    load = host.plan_load(keys[held:], now=1)
    assert [memory[move.lane, move.host_page] for move in load.moves] == keys[held:]


@proves("H3", "H5")
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.sets(st.sampled_from(list(LAYERS)))), max_size=8),
)
def test_storage_can_bring_what_every_rank_has_of_every_cache(
    world_size: int, pages: list[tuple[int, set[str]]]
) -> None:
    lanes = [lane % world_size for lane, _ in pages]
    lacking = [lacks if i % 3 == 2 else set[str]() for i, (_, lacks) in enumerate(pages)]

    def answers(rank: int) -> dict[str, list[bool]]:
        mine = [lacks for lane, lacks in zip(lanes, lacking, strict=True) if lane == rank]
        return {cache: [cache not in lacks for lacks in mine] for cache in LAYERS}

    expected = next((i for i, lacks in enumerate(lacking) if lacks), len(pages))
    assert min(own_prefix(lanes, rank, answers(rank), list(LAYERS)) for rank in range(world_size)) == expected


def test_storage_that_never_heard_of_a_cache_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"expected 1, one a page of the rank, got 0 \(rank 0, cache index\)"
    ):
        own_prefix([0], 0, {"kv": [True]}, ["kv", "index"])
