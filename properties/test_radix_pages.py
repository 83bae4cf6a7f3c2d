"""Laws L5, L6: whose each page is, the tree's or a request's, which tail is copied, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.radix_requests import Served, either, empty_served, prompts, served, steps
from properties.strategies import plans
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import num_pages
from refmodel.layout.plan import Plan
from refmodel.layout.split import Split
from refmodel.serving.radix import HitMode, RadixTree
from refmodel.serving.request_pages import copy_lane, copy_on_write


@proves("L6")
@given(empty_served(either), steps)
def test_every_page_is_the_trees_or_a_requests_or_freed_once(
    world: Served, played: list[tuple[Any, ...]]
) -> None:
    for step in played:
        world.step(*step)
        assert world.tree.check() == ()
        own = [page for r in world.running for page in r.pages if not world.tree.holds(page)]
        assert sorted([*world.tree.pages(), *own, *world.freed]) == list(world.rows)


@proves("L6")
@given(served(either))
def test_the_tree_has_no_beginning_twice(world: Served) -> None:
    whole = [world.rows[page][-1] for page in world.tree.pages() if len(world.rows[page]) == world.page_size]
    assert len(set(whole)) == len(whole)


@proves("L6")
@given(served(either), prompts, st.integers(1, 14))
def test_after_a_chunk_a_request_has_the_trees_whole_pages_and_its_own_tail(
    world: Served, tokens: list[int], end: int
) -> None:
    world.start(tokens)
    request = world.running[-1]
    world.chunk(len(world.running) - 1, end)
    num_whole = len(world.keys(tokens[: request.end])) // world.page_size
    holds = [world.tree.holds(page) for page in request.pages]
    assert holds == [position < num_whole for position in range(len(holds))]
    twin = world.tree.match([*tokens[: request.end], 2], world.now)
    assert list(twin.pages[:num_whole]) == request.pages[:num_whole]


@proves("L5")
@given(
    st.integers(1, 4),
    st.integers(0, 12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.integers(0, 2),
)
def test_a_tail_is_copied_exactly_if_somebody_else_holds_it(
    page_size: int, valid: int, held: list[bool], spare: int
) -> None:
    pages = range(100, 100 + num_pages(valid, page_size) + spare)
    position = copy_on_write(pages, valid, lambda page: held[page - 100], page_size)
    shared_tail = valid % page_size != 0 and held[valid // page_size]
    assert position == (valid // page_size if shared_tail else None)


@proves("L5", "O4")
@given(plans(splits=(Split.PAGE_ALIGNED,), max_page=16))
def test_the_copy_goes_to_the_rank_that_computes_the_page(plan: Plan) -> None:
    for request, first_row in enumerate(plan.row_starts[:-1]):
        assert copy_lane(plan, request) == plan.rank_of_row[first_row]


# Each refused operation, on a tree with page 5 and its tail 6 inserted, node 2 locked once.
REFUSED: dict[str, Callable[[RadixTree], object]] = {
    "too few pages": lambda tree: tree.insert([1, 2, 3, 4], [7], 5),
    "a page twice": lambda tree: tree.insert([1, 2, 3, 4], [7, 7], 5),
    "no page": lambda tree: tree.insert([9, 9], [-1], 5),
    "a page of the tree for other tokens": lambda tree: tree.insert([1, 2, 3, 9], [5, 6], 5),
    "a tail of the tree behind the chunk": lambda tree: tree.insert([1, 2, 9], [5, 6], 5),
    "a page of the tree as a duplicate": lambda tree: tree.insert([1, 2], [6], 5),
    "a wall time": lambda tree: tree.match([1], 5.5),  # type: ignore[arg-type]
    "a time before all": lambda tree: tree.insert([1, 2], [5], -1),
    "an unknown node": lambda tree: tree.lock(3),
    "one unlock too many": lambda tree: tree.unlock(1),
    "no such lane": lambda tree: tree.evict(2, 2),
    "a table shorter than its tokens": lambda tree: copy_on_write([5], 3, tree.holds, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    tree = RadixTree(2, HitMode.TOKEN)
    tree.lock(tree.insert([1, 2, 3], [5, 6], 1, finished=True).node)
    before = tree.fingerprint()
    with pytest.raises(InvalidInput):
        REFUSED[name](tree)
    assert tree.fingerprint() == before


def test_check_names_a_page_in_two_places() -> None:
    tree = RadixTree(1, HitMode.PAGE)
    tree.insert([1, 2], [4, 5], 1)
    tree._held.remove(5)
    assert [finding.law for finding in tree.check()] == ["L6"]
