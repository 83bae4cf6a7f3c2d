"""Laws H1, H6: bytes come back as they were from every layout, by every engine that goes with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.refusals import refusal
from properties.strategies import INDEX_FORMATS, MLA_FORMATS
from refmodel.errors import InvalidInput
from refmodel.serving.host_layouts import CopyEngine, HostLayout, HostPool, check_engine, empty_host_pool
from refmodel.serving.page_groups import PagePairs
from refmodel.storage.formats import TAG, Format, index_format, mla_format
from refmodel.storage.identity import Cache

L, K = HostLayout, CopyEngine
FITTING = (
    (L.LAYER_FIRST, K.KERNEL),
    (L.PAGE_FIRST, K.KERNEL),
    (L.LAYER_FIRST, K.DIRECT),
    (L.PAGE_FIRST_DIRECT, K.DIRECT),
)
KINDS = (
    *((Cache.KV, fmt) for fmt in (TAG, *MLA_FORMATS)),
    *((Cache.INDEX, fmt) for fmt in (TAG, *INDEX_FORMATS)),
)
DEVICE_PAGES = 6  # of a shard, dummy included
HOST_PAGES = 5


@st.composite
def pools(draw: st.DrawFn) -> HostPool:
    layout, engine = draw(st.sampled_from(FITTING))
    cache, fmt = draw(st.sampled_from(KINDS))
    page_size, layers = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    return empty_host_pool(
        layout, engine, cache, fmt, page_size=page_size, layers=layers, num_pages=HOST_PAGES
    )


@st.composite
def pairs(draw: st.DrawFn) -> PagePairs:
    host = draw(st.permutations(range(HOST_PAGES)))
    device = draw(st.permutations(range(1, DEVICE_PAGES)))
    count = draw(st.integers(0, HOST_PAGES))
    return PagePairs(tuple(host[:count]), tuple(device[:count]))


def random_shards(pool: HostPool, seed: int) -> torch.Tensor:
    """[layers, local pages, page bytes] of a rank."""
    generator = torch.Generator().manual_seed(seed)
    size = (pool.layers, DEVICE_PAGES, pool.format.page_bytes(pool.page_size))
    return torch.randint(256, size, dtype=torch.uint8, generator=generator)


@proves("H1")
@given(pools(), pairs(), st.permutations(range(1, DEVICE_PAGES)), st.integers(0, 2**16))
def test_device_to_host_to_device_is_the_identity(
    pool: HostPool, stored: PagePairs, elsewhere: list[int], seed: int
) -> None:
    shards = random_shards(pool, seed)
    for layer, pages in enumerate(shards):
        pool.store(stored, layer, pages)
    back = random_shards(pool, seed + 1)
    before = back.clone()
    loaded = PagePairs(stored.host, tuple(elsewhere[: len(stored)]))
    for layer, pages in reversed(list(enumerate(back))):
        pool.load(loaded, layer, pages)
        assert torch.equal(back[:layer], before[:layer])  # one layer at a time
    assert torch.equal(back[:, list(loaded.device)], shards[:, list(stored.device)])
    others = [page for page in range(DEVICE_PAGES) if page not in loaded.device]
    assert torch.equal(back[:, others], before[:, others])


@proves("H1")
@given(pools(), pairs(), st.integers(0, 2**16))
def test_bytes_lie_where_the_layout_says_and_nowhere_else(
    pool: HostPool, stored: PagePairs, seed: int
) -> None:
    shards = random_shards(pool, seed)
    expected = pool.bytes.clone()
    P, D = pool.page_size, pool.format.bytes_per_token
    for layer, pages in enumerate(shards):
        pool.store(stored, layer, pages)
        for host, device in zip(stored.host, stored.device, strict=True):
            page = pages[device]
            if pool.cache is Cache.INDEX and pool.layout is L.PAGE_FIRST_DIRECT:
                expected[host, layer] = page
            elif pool.cache is Cache.INDEX:
                expected[layer, host] = page
            elif pool.layout is L.PAGE_FIRST_DIRECT:
                expected[host, layer] = page.view(P, D)
            else:
                for offset, row in enumerate(page.view(P, D)):
                    slot = host * P + offset
                    where = (layer, slot) if pool.layout is L.LAYER_FIRST else (slot, layer)
                    expected[where] = row
    assert torch.equal(pool.bytes, expected)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("layout", "engine"), FITTING)
def test_production_sizes(layout: HostLayout, engine: CopyEngine, precision: str) -> None:
    for cache, fmt in (
        (Cache.KV, mla_format(precision, latent=512, rope=64)),
        (Cache.INDEX, index_format(precision, 128)),
    ):
        pool = empty_host_pool(layout, engine, cache, fmt, page_size=64, layers=2, num_pages=HOST_PAGES)
        shards, back = random_shards(pool, 0), random_shards(pool, 1)
        moved = PagePairs((4, 0, 2), (1, 5, 3))
        for layer in range(2):
            pool.store(moved, layer, shards[layer])
            pool.load(moved, layer, back[layer])
        assert torch.equal(back[:, list(moved.device)], shards[:, list(moved.device)])


@proves("H6")
@given(st.sampled_from(list(HostLayout)), st.sampled_from(list(CopyEngine)), st.sampled_from(KINDS))
def test_a_pool_has_the_layout_and_the_engine_asked_for_or_is_refused(
    layout: HostLayout, engine: CopyEngine, kind: tuple[Cache, Format]
) -> None:
    def build() -> HostPool:
        return empty_host_pool(layout, engine, *kind, page_size=2, layers=1, num_pages=1)

    if (layout, engine) in FITTING:
        pool = build()
        assert (pool.layout, pool.engine) == (layout, engine)
        return
    allowed = [fit.value for fit, by in FITTING if by is engine]
    for named in ("host layout", layout.value, engine.value, *allowed):
        assert named in refusal(build)


@proves("H6")
@given(st.sampled_from(list(HostLayout)), st.sampled_from(list(CopyEngine)))
def test_a_pair_that_does_not_fit_is_refused_before_there_is_a_pool(
    layout: HostLayout, engine: CopyEngine
) -> None:
    assume((layout, engine) not in FITTING)
    assert f"with copy engine {engine.value}, got {layout.value}" in refusal(check_engine, layout, engine)


SMALL = empty_host_pool(L.LAYER_FIRST, K.KERNEL, Cache.KV, TAG, page_size=2, layers=2, num_pages=3)


@pytest.mark.parametrize(
    ("pages", "layer", "page_bytes", "why"),
    [
        (PagePairs((0,), (1,)), 2, 16, "layer of a host pool: expected 0 … 1, got 2"),
        (PagePairs((0,), (1,)), -1, 16, "layer of a host pool: expected 0 … 1, got -1"),
        (PagePairs((0, 3), (2, 1)), 0, 16, "host page: expected 0 … 2, got 3"),
        (PagePairs((0, 1), (2, 4)), 0, 16, "local page: expected 0 … 3, got 4"),
        (PagePairs((0, 1), (2, 0)), 0, 16, "local page: expected >= 1, got 0, the dummy page"),
        (
            PagePairs((0, 1), (2, 3)),
            0,
            24,
            r"pages in format tag: expected \[local pages, 16\], got \[4, 24\]",
        ),
    ],
)
def test_a_copy_that_has_no_meaning_moves_no_byte(
    pages: PagePairs, layer: int, page_bytes: int, why: str
) -> None:
    before = SMALL.bytes.clone()
    device = torch.zeros(4, page_bytes, dtype=torch.uint8)
    for copy in (SMALL.store, SMALL.load):
        with pytest.raises(InvalidInput, match=why):
            copy(pages, layer, device)
    assert torch.equal(SMALL.bytes, before)
    assert not device.any()


@pytest.mark.parametrize(
    ("cache", "fmt", "why"),
    [
        (Cache.QUERY, TAG, "cache of a host pool: expected KV or INDEX, got QUERY"),
        (Cache.KV, index_format("fp8", 4), "format of a host pool of KV"),
    ],
)
def test_what_is_no_cache_has_no_pool(cache: Cache, fmt: Format, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        empty_host_pool(L.LAYER_FIRST, K.KERNEL, cache, fmt, page_size=2, layers=1, num_pages=1)


def test_bytes_of_another_shape_are_no_pool() -> None:
    with pytest.raises(InvalidInput, match=r"page_first: expected uint8 \[6, 2, 8\]"):
        HostPool(L.PAGE_FIRST, K.KERNEL, Cache.KV, TAG, 2, 2, 3, SMALL.bytes)
