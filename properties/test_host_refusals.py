"""What a host cache refuses changes nothing, and its check finds broken books."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.host_copies import filled, host_of
from properties.proofs import proves
from properties.refusals import refusal
from refmodel.errors import InvalidInput
from refmodel.serving.host_cache import HostCache
from refmodel.serving.host_moves import Fill, Load

REFUSED: dict[str, tuple[Callable[[HostCache, Fill, Load], object], str]] = {
    "dummy": (
        lambda host, fill, load: host.plan_backup([1], [1], 0),
        "expected logical pages >= W = 2, each once, got 1",
    ),
    "page twice": (lambda host, fill, load: host.plan_backup([1, 2], [4, 4], 0), "pages to back up"),
    "key twice": (lambda host, fill, load: host.plan_backup([1, 1], [4, 5], 0), "keys of a fill"),
    "lengths": (
        lambda host, fill, load: host.plan_backup([1], [4, 5], 0),
        "keys of a fill: expected 2, each once",
    ),
    "no such lane": (lambda host, fill, load: host.plan_prefetch([1], [2], 0), "lane: expected 0 … 1, got 2"),
    "no such cache": (
        lambda host, fill, load: host.arrived(fill, "query"),
        "cache: expected one of kv, index",
    ),
    "more than asked for": (
        lambda host, fill, load: host.arrived(fill, "kv", 2),
        "pages that arrived: expected 0 … 1",
    ),
    "closed": (
        lambda host, fill, load: host.close(Fill(0, (), ())),
        "fill: expected one that is under way, got number 0",
    ),
    "ended": (
        lambda host, fill, load: host.abandon(Load(9, ())),
        "load: expected one that is under way, got number 9",
    ),
    "no copy": (
        lambda host, fill, load: host.plan_load([70, 99], 0),
        "all its caches (H3), got none for key 99",
    ),
    "part of a copy": (
        lambda host, fill, load: host.pin([70, 80]),
        "got key 80 without index, draft_kv, draft_index",
    ),
    "loaded twice": (
        lambda host, fill, load: host.plan_load([70, 70], 0),
        "keys of a load: expected each once",
    ),
    "layer twice": (
        lambda host, fill, load: host.mark_loaded(load, "kv", 0),
        "expected each layer loaded once",
    ),
    "no such layer": (
        lambda host, fill, load: host.mark_loaded(load, "draft_kv", 1),
        "layer of a load: expected 0 … 0",
    ),
    "layer of none": (
        lambda host, fill, load: host.require_layer(load, "query", 0),
        "cache: expected one of kv, index",
    ),
    "not pinned": (
        lambda host, fill, load: host.unpin([70]),
        "pins of a host page: expected >= 1, got 0 of key 70",
    ),
    "negative": (lambda host, fill, load: host.evict(0, -1), "host pages to evict: expected an integer >= 0"),
}


@proves("H4")
@given(st.sampled_from(sorted(REFUSED)))
def test_what_is_refused_changes_nothing(name: str) -> None:
    host = host_of(2, pages_per_lane=2)
    filled(host, [70], [0])
    fill = host.plan_prefetch([80], [1], now=1)
    host.arrived(fill, "kv")
    load = host.plan_load([70], now=2)
    host.mark_loaded(load, "kv", 0)
    before = host.fingerprint()
    act, why = REFUSED[name]
    assert why in refusal(act, host, fill, load)
    assert host.fingerprint() == before
    assert host.check() == ()


@pytest.mark.parametrize(
    ("layers", "world_size", "pages", "why"),
    [
        ({}, 1, 1, "caches of a host cache"),
        ({"kv": 0}, 1, 1, "layers of cache kv"),
        ({"kv": 1}, 0, 1, "world size W"),
        ({"kv": 1}, 1, -1, "host pages of a lane"),
    ],
)
def test_sizes_are_checked(layers: dict[str, int], world_size: int, pages: int, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        HostCache(layers, world_size=world_size, pages_per_lane=pages)


def test_broken_books_are_found() -> None:
    host = host_of(1, pages_per_lane=2)
    filled(host, [70], [0])
    fill = host.plan_prefetch([71], [0], now=1)
    host._pages.unpin([71])
    host._pages._free[0].append(0)
    del host._fills[fill.number]
    host._held.update([70])
    assert [finding.law for finding in host.check()] == ["H4", "H4", "H3"]
