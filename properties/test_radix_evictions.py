"""Laws L3, L6, L7: which pages of the tree are evicted, in which order, and which are locked."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.radix_requests import LANES, Served, either, lanes, prompts, served, steps, truth
from refmodel.serving.radix import HitMode, RadixTree


@proves("L6")
@given(served(either), prompts, steps)
def test_a_locked_hit_outlives_whatever_comes(
    world: Served, tokens: list[int], later: list[tuple[Any, ...]]
) -> None:
    hit = world.tree.match(tokens, world.now)
    world.tree.lock(hit.node)
    for step in [*later, ("evict", 0), ("evict", 1), ("evict", 0)]:
        world.step(*step)
        assert all(world.tree.holds(page) for page in hit.pages)
    assert world.cached(hit.pages, hit.valid) == truth(world.keys(tokens)[: hit.valid])
    world.tree.unlock(hit.node)


@proves("L6", "L3")
@given(served(either), lanes)
def test_eviction_relieves_a_lane_until_none_of_it_is_left(world: Served, lane: int) -> None:
    while world.running:
        world.finish(0)
    while any(page % LANES == lane for page in world.tree.pages()):
        ends = path_ends(world)
        freed = world.evict(lane)
        assert freed
        owned = [page for page in ends if page % LANES == lane]
        assert any(page % LANES == lane for page in freed) or not owned
    assert world.evict(lane) == ()


def path_ends(world: Served) -> list[int]:
    """Pages of the tree with none behind them."""
    pages = world.tree.pages()
    whole = [world.rows[page][-1] for page in pages]
    return [
        page
        for page, row in zip(pages, whole, strict=True)
        if not any(len(other) > len(row) and other[: len(row)] == row for other in whole)
    ]


@proves("L7")
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 6)), max_size=6),
)
def test_victims_go_by_last_touch_then_creation(inserts: list[int], matches: list[tuple[int, int]]) -> None:
    tree, touched = RadixTree(1, HitMode.PAGE), dict(enumerate(inserts))
    for page, now in touched.items():
        tree.insert([page], [page], now)
    for which, now in matches:
        page = which % len(inserts)
        tree.match([page, 0], now)
        touched[page] = now
    order = [tree.evict(0, 1) for _ in inserts]
    assert order == [(page,) for page in sorted(touched, key=lambda page: (touched[page], page))]


def test_a_lock_stays_with_the_end_of_a_node_that_is_split() -> None:
    tree = RadixTree(1, HitMode.PAGE)
    node = tree.insert([1, 2, 3], [4, 5, 6], 1).node
    tree.lock(node)
    tree.insert([1, 9], [4, 7], 2)
    assert tree.evict(0, 1) == (7,)
    assert tree.evict(0, 1) == ()
    tree.unlock(node)
    assert tree.evict(0, 1) == (5, 6)
    assert tree.evict(0, 1) == (4,)
