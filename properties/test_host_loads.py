"""Laws H1, H4, H5: when a layer that is loaded may be read, and where its pages land."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.host_copies import LAYERS, PARTS, filled, host_of
from properties.proofs import proves
from properties.refusals import refusal
from refmodel.errors import InvalidInput
from refmodel.layout.ownership import local_page, logical_page, owner
from refmodel.serving.host_layouts import CopyEngine, HostLayout, empty_host_pool
from refmodel.serving.host_moves import Load, Move, backed_up_by, land, land_elsewhere
from refmodel.serving.layer_gate import LayerGate
from refmodel.storage.formats import TAG
from refmodel.storage.identity import Cache


@proves("H1", "H3", "H4")
@given(st.integers(1, 3), st.integers(0, 2**16))
def test_every_cache_of_a_page_comes_back_byte_for_byte(world_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, P = [70, 71, 72, 73], 2
    shape = (world_size, 10, TAG.page_bytes(P))  # every rank's pages of one layer of one cache

    def shards() -> dict[tuple[str, int], torch.Tensor]:
        return {part: torch.randint(256, shape, dtype=torch.uint8, generator=generator) for part in PARTS}

    pools = {
        cache: [
            empty_host_pool(
                HostLayout.PAGE_FIRST,
                CopyEngine.KERNEL,
                Cache.KV,
                TAG,
                page_size=P,
                layers=layers,
                num_pages=4,
            )
            for _ in range(world_size)
        ]
        for cache, layers in LAYERS.items()
    }
    host, before, after = host_of(world_size, pages_per_lane=4), shards(), shards()
    pages = [logical_page(1 + i, (seed + i) % world_size, world_size) for i in range(4)]
    fill = host.plan_backup(keys, pages, now=0)
    for cache, layer in PARTS:
        for rank, pool in enumerate(pools[cache]):
            pool.store(backed_up_by(rank, fill, pages, world_size), layer, before[cache, layer][rank])
        host.arrived(fill, cache)
    assert host.close(fill) == ()
    load = host.plan_load(keys, now=1)
    landing = land(load, [page + 4 * world_size for page in pages], world_size)
    for cache, layer in host.unloaded(load):
        for rank, pool in enumerate(pools[cache]):
            pool.load(landing.pairs(rank, rank), layer, after[cache, layer][rank])
        host.mark_loaded(load, cache, layer)
    host.finish(load)
    for part in PARTS:
        for page, landed in zip(pages, landing.pages, strict=True):
            there = before[part][owner(page, world_size), local_page(page, world_size)]
            here = after[part][owner(landed, world_size), local_page(landed, world_size)]
            assert torch.equal(here, there), part


@proves("H4")
@given(st.permutations(PARTS), st.integers(0, len(PARTS)))
def test_a_layer_is_read_only_after_it_is_loaded(order: list[tuple[str, int]], loaded: int) -> None:
    host = host_of(1, pages_per_lane=1)
    filled(host, [70], [0])
    load = host.plan_load([70], now=0)
    for part in order[:loaded]:
        host.mark_loaded(load, *part)
    for part in PARTS:
        if part in order[:loaded]:
            host.require_layer(load, *part)
            continue
        assert f"layer {part[1]}, cache {part[0]}" in refusal(host.require_layer, load, *part)
    assert set(host.unloaded(load)) == set(order[loaded:])
    missing = len(PARTS) - loaded
    assert (f"{missing} missing" in refusal(host.finish, load)) == bool(missing)


def test_the_state_of_a_gate_is_what_it_has_loaded() -> None:
    gate = LayerGate(LAYERS)
    gate.mark_loaded("index", 1)
    assert gate.fingerprint() == ((0, 0), (0, 1), (0,), (0,))


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, Load, list[int]]:
    """(W, a load, a logical page for each move)."""
    world_size = draw(st.integers(1, 4))
    lane = st.integers(0, world_size - 1)
    lanes = draw(st.lists(lane, max_size=6))
    moves = tuple(Move(i, 70 + i, lane, host_page=i) for i, lane in enumerate(lanes))
    same = draw(st.booleans())
    pages = [
        logical_page(9 - i, lane if same else draw(st.integers(0, world_size - 1)), world_size)
        for i, lane in enumerate(lanes)
    ]
    return world_size, Load(0, moves), pages


@proves("H4")
@given(loads())
def test_a_page_lands_in_the_lane_of_its_copy_or_nowhere(drawn: tuple[int, Load, list[int]]) -> None:
    world_size, load, pages = drawn
    if all(page % world_size == move.lane for page, move in zip(pages, load.moves, strict=True)):
        assert land(load, pages, world_size).moved == ()
        return
    assert refusal(land, load, pages, world_size).startswith("page of a load: expected one of lane")


@proves("H4", "H5")
@given(loads())
def test_a_page_that_lands_elsewhere_tells_its_new_owner(drawn: tuple[int, Load, list[int]]) -> None:
    world_size, load, pages = drawn
    landing = land_elsewhere(load, pages, world_size)
    assert landing.owners == tuple(page % world_size for page in pages)
    assert landing.moved == tuple(i for i, page in enumerate(pages) if page % world_size != load.lanes[i])
    loaded = Counter(
        (lane, host_page, logical_page(local, rank, world_size))
        for lane in range(world_size)
        for rank in range(world_size)
        for pairs in [landing.pairs(lane, rank)]
        for host_page, local in zip(pairs.host, pairs.device, strict=True)
    )
    moves = zip(load.moves, pages, strict=True)
    assert loaded == Counter((move.lane, move.host_page, page) for move, page in moves)


@pytest.mark.parametrize(
    ("pages", "why"),
    [([4, 5], "expected 1, one a move, got 2"), ([1], "expected logical pages >= W = 2, each once, got 1")],
)
def test_a_load_lands_in_real_pages(pages: list[int], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        land(Load(0, (Move(0, 70, 0, 0),)), pages, world_size=2)
