"""Laws L4–L8: the radix tree, against requests whose every cached row is written down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import plans
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import num_pages
from refmodel.layout.plan import Plan
from refmodel.layout.split import Split
from refmodel.serving.page_keys import TOKEN_BYTES, PageKeys, token_bytes, tokens_of
from refmodel.serving.radix import HitMode, RadixTree
from refmodel.serving.request_pages import copy_lane, copy_on_write, end_of_chunk

LANES = 2  # ids of pages go round them, so that requests mix lanes
Keys = tuple[tuple[int, ...], ...]  # a prompt's keys: (token,), or pairs

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # two tokens: prompts meet and part everywhere
page_sizes = st.integers(1, 4)
modes = st.sampled_from(HitMode)
lanes = st.integers(0, LANES - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), prompts, st.integers(1, 14)),
        st.tuples(st.just("serve"), prompts, st.integers(1, 14)),
        st.tuples(st.just("start"), prompts),
        st.tuples(st.just("chunk"), st.integers(0, 3), st.integers(1, 7)),
        st.tuples(st.just("finish"), st.integers(0, 3)),
        st.tuples(st.just("evict"), lanes),
        st.tuples(st.just("look"), prompts),
    ),
    min_size=6,
    max_size=20,
)


@dataclass(slots=True, eq=False)
class Request:
    """A running request: its prompt, its pages, and how far it is."""

    tokens: list[int]
    pages: list[int]
    done: int  # rows cached, with their keys
    node: int  # that it locks
    end: int = 0  # tokens of the chunks so far


class Served:
    """Requests served over one tree, in chunks, by the rules of L5 and L6.

    A cached row is written down as all the keys up to it, for KV depends on them; a freed page has none.
    """

    def __init__(self, page_size: int, mode: HitMode, *, bigram: bool = False) -> None:
        self.tree = RadixTree(page_size, mode, bigram=bigram)
        self.page_size = page_size
        self.bigram = bigram
        self.rows: dict[int, list[Keys]] = {}  # page → what its slots hold
        self.running: list[Request] = []
        self.freed: list[int] = []
        self.now = 0

    def keys(self, tokens: Sequence[int]) -> Keys:
        """From the definition (L8)."""
        return tuple(pairwise(tokens)) if self.bigram else tuple((t,) for t in tokens)

    def step(self, name: str, *args: Any) -> object:
        self.now += 1
        return getattr(self, name)(*args)

    # -- steps -------------------------------------------------------------------------------------------

    def start(self, tokens: list[int]) -> None:
        hit = self.tree.match(tokens, self.now)
        self.tree.lock(hit.node)
        self.running.append(Request(tokens, list(hit.pages), hit.valid, hit.node))

    def chunk(self, which: int, num_tokens: int) -> None:
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        request.end = min(max(request.end, request.done) + num_tokens, len(request.tokens))
        tokens = request.tokens[: request.end]
        self._compute(request, tokens)
        end = end_of_chunk(self.tree, tokens, request.pages, self.now)
        self.free(end.duplicates)
        self.tree.lock(end.node)
        self.tree.unlock(request.node)
        request.pages, request.node = list(end.pages), end.node

    def finish(self, which: int) -> None:
        if not self.running:
            return
        request = self.running.pop(which % len(self.running))
        self._compute(request, request.tokens)
        inserted = self.tree.insert(request.tokens, request.pages, self.now, finished=True)
        self.free(inserted.duplicates + inserted.rest)
        self.tree.unlock(request.node)

    def serve(self, tokens: list[int], num_tokens: int) -> None:
        self.start(tokens)
        self.chunk(len(self.running) - 1, num_tokens)
        self.finish(len(self.running) - 1)

    def evict(self, lane: int) -> tuple[int, ...]:
        pages = self.tree.evict(lane, LANES)
        self.free(pages)
        return pages

    def look(self, tokens: list[int]) -> object:
        return self.tree.match(tokens, self.now)

    # -- pages and rows ----------------------------------------------------------------------------------

    def free(self, pages: Sequence[int]) -> None:
        self.freed += pages
        for page in pages:
            self.rows[page] = []

    def _compute(self, request: Request, tokens: list[int]) -> None:
        """Extend a request to these tokens: take pages, copy a shared tail, write rows.

        The last token of a bigram tree has no key yet: its row is written, and again when the key is known.
        """
        P, keys = self.page_size, self.keys(tokens)
        request.pages += [self._take() for _ in range(num_pages(len(tokens), P) - len(request.pages))]
        position = copy_on_write(request.pages, request.done, self.tree.holds, P)
        if position is not None:
            copy = self._take()
            self.rows[copy] = self.rows[request.pages[position]][: request.done % P]
            request.pages[position] = copy
        for i in range(request.done, len(tokens)):
            page = request.pages[i // P]
            assert not self.tree.holds(page), f"L5: position {i} is written into page {page} of the tree"
            self.rows[page] = [*self.rows[page][: i % P], keys[: i + 1]]
        request.done = len(keys)

    def _take(self) -> int:
        page = len(self.rows)
        self.rows[page] = []
        return page

    def cached(self, pages: Sequence[int], valid: int) -> list[Keys]:
        """What the first rows of these pages hold."""
        P = self.page_size
        return [keys for i, page in enumerate(pages) for keys in self.rows[page][: max(0, valid - i * P)]]

    def longest(self, tokens: list[int]) -> int:
        """Brute force: the longest beginning of the keys that rows of the tree's pages hold, by mode (L4)."""
        keys = self.keys(tokens)[: len(tokens) - 1]
        rows = {row for page in self.tree.pages() for row in self.rows[page]}
        found = max((n for n in range(1, len(keys) + 1) if keys[:n] in rows), default=0)
        return found if self.tree.mode is HitMode.TOKEN else found - found % self.page_size


def truth(keys: Keys) -> list[Keys]:
    """What rows 0, 1, … of a request with these keys hold."""
    return [keys[: i + 1] for i in range(len(keys))]


def served(bigram: st.SearchStrategy[bool]) -> st.SearchStrategy[Served]:
    """A tree that has served some steps."""

    def play(empty: Served, played: list[tuple[Any, ...]]) -> Served:
        for step in played:
            empty.step(*step)
        return empty

    return st.builds(play, empty_served(bigram), steps)


def empty_served(bigram: st.SearchStrategy[bool]) -> st.SearchStrategy[Served]:
    return st.builds(Served, page_sizes, modes, bigram=bigram)


plain, either = st.just(False), st.booleans()


@proves("L4")
@given(served(either), prompts)
def test_a_hit_is_the_longest_that_leaves_a_token_and_holds_the_very_rows(
    world: Served, tokens: list[int]
) -> None:
    longest = world.longest(tokens)
    hit = world.tree.match(tokens, world.now)
    assert hit.valid == longest <= len(tokens) - 1
    assert len(hit.pages) == num_pages(hit.valid, world.page_size)
    assert hit.coverage == len(hit.pages) * world.page_size
    assert world.cached(hit.pages, hit.valid) == truth(world.keys(tokens)[: hit.valid])


@proves("L4")
@given(page_sizes, modes, prompts)
def test_a_prompt_served_before_is_hit_up_to_its_last_token(
    page_size: int, mode: HitMode, tokens: list[int]
) -> None:
    tree = RadixTree(page_size, mode)
    tree.insert(tokens, range(len(tokens)), 0, finished=True)
    expected = len(tokens) - 1 if mode is HitMode.TOKEN else (len(tokens) - 1) // page_size * page_size
    assert tree.match(tokens, 1).valid == expected


@proves("L4", "L5", "L6")
@given(empty_served(either), steps)
def test_every_running_request_finds_its_own_rows_after_every_step(
    world: Served, played: list[tuple[Any, ...]]
) -> None:
    for step in played:
        world.step(*step)
        for request in world.running:
            rows = world.cached(request.pages, request.done)
            assert rows == truth(world.keys(request.tokens)[: request.done])


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


@proves("L7")
@given(page_sizes, modes, st.integers(1, 3), steps)
def test_equal_steps_make_equal_trees_and_equal_victims(
    page_size: int, mode: HitMode, slowness: int, played: list[tuple[Any, ...]]
) -> None:
    ranks = [Served(page_size, mode) for _ in range(2)]
    for count, step in enumerate([*played, *[("evict", 0), ("evict", 1)] * 4]):
        for rank in ranks:
            rank.now = count // slowness  # several touches at one logical time
        one, other = (rank.step(*step) for rank in ranks)
        assert one == other
        assert ranks[0].tree.fingerprint() == ranks[1].tree.fingerprint()


@proves("L8")
@given(page_sizes, modes, st.lists(prompts, max_size=6), prompts)
def test_a_bigram_tree_of_tokens_is_a_plain_tree_of_pairs(
    page_size: int, mode: HitMode, inserts: list[list[int]], tokens: list[int]
) -> None:
    bigram, plain_tree = RadixTree(page_size, mode, bigram=True), RadixTree(page_size, mode)
    for i, prompt in enumerate(inserts):
        pages = range(20 * i, 20 * i + len(prompt))
        one = bigram.insert(prompt, pages, i, finished=True)
        other = plain_tree.insert(pairs(prompt), pages, i, finished=True)
        assert one == other
    no_pair = 2**64 - 1  # a plain hit leaves its last key; a bigram hit has left the last token already
    assert bigram.match(tokens, 9) == plain_tree.match([*pairs(tokens), no_pair], 9)


def pairs(tokens: Sequence[int]) -> list[int]:
    return [2 * one + other for one, other in pairwise(tokens)]


@proves("L8")
@given(st.integers(1, 64), st.integers(0, 4), st.integers(-1, 1))
def test_a_page_of_bigram_keys_needs_one_token_more(page_size: int, num_whole: int, more: int) -> None:
    num_tokens = max(1, num_whole * page_size + 1 + more)
    tokens = torch.arange(num_tokens).tolist()
    tree = RadixTree(page_size, HitMode.PAGE, bigram=True)
    inserted = tree.insert(tokens, range(num_tokens), 0)
    assert len(inserted.pages) == (num_tokens - 1) // page_size
    assert tree.match(tokens, 1).valid == (num_tokens - 1) // page_size * page_size


# -- page keys ---------------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2) | st.integers(0, 2**64 - 1), max_size=12)


@proves("L8")
@given(st.integers(1, 4), st.booleans(), ids)
def test_page_keys_are_the_tokens_of_their_pages(page_size: int, bigram: bool, tokens: list[int]) -> None:
    whole, short = PageKeys(page_size, bigram).cut(tokens)
    pieces = [
        tokens[start : start + page_size + bigram]
        for start in range(0, max(0, len(tokens) - bigram), page_size)
    ]
    cut = [tokens_of(key).tolist() for key in (*whole, short) if key]
    assert cut == pieces
    assert [len(piece) - bigram for piece in pieces[: len(whole)]] == [page_size] * len(whole)


@given(st.integers(1, 4), st.booleans(), st.lists(st.integers(0, 2**63 - 1), max_size=12))
def test_tokens_of_a_list_and_of_arrays_give_the_same_keys(
    page_size: int, bigram: bool, tokens: list[int]
) -> None:
    keys = PageKeys(page_size, bigram)
    for kind in (np.int64, np.uint64):
        assert keys.cut(np.array(tokens, dtype=kind)) == keys.cut(tokens)


@proves("L8")
@given(st.booleans(), ids, ids, ids)
def test_pages_share_the_keys_before_the_first_that_differs(
    bigram: bool, head: list[int], one: list[int], other: list[int]
) -> None:
    keys = PageKeys(64, bigram)
    pairs_of = (pairwise_or_plain(head + rest, bigram) for rest in (one, other))
    same = [a == b for a, b in zip(*pairs_of, strict=False)]
    expected = same.index(False) if False in same else len(same)
    assert keys.common(token_bytes(head + one), token_bytes(head + other)) == expected


def pairwise_or_plain(tokens: list[int], bigram: bool) -> list[tuple[int, ...]]:
    return list(pairwise(tokens)) if bigram else [(token,) for token in tokens]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, -1], "negative"),
        ([2**64], "too big"),
        ([1.5], "float"),
        (np.array([1, -1]), "-1"),
        (np.array([1.5]), "float64"),
        (np.array([[1]]), "2 dimensions"),
        (np.array([1], dtype=np.int32), "int32"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(tokens: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        PageKeys(1).cut(tokens)


@proves("L7")
@given(served(either))
def test_a_fingerprint_tells_the_tokens_of_every_page(world: Served) -> None:
    tree = world.tree
    for number, node in tree._nodes.items():
        for position, key in enumerate(node.keys):
            before, keys, pages = tree.fingerprint(), node.keys, node.pages
            changed = key[:-TOKEN_BYTES] + token_bytes([7])
            node.hold((*keys[:position], changed, *keys[position + 1 :]), pages)
            assert tree.fingerprint() != before, f"page {position} of node {number}"
            node.hold(keys, pages)
            assert tree.fingerprint() == before


def test_a_fingerprint_is_equal_in_every_process() -> None:
    program = (
        "from refmodel.serving.radix import HitMode, RadixTree\n"
        "tree = RadixTree(2, HitMode.TOKEN)\n"
        "tree.insert([1, 2, 3, 4, 5], [5, 6, 7], 1, finished=True)\n"
        "tree.insert([1, 2, 4], [5, 8], 2, finished=True)\n"
        "print(tree.fingerprint())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(said) == 1
    assert said != {""}


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


def test_check_names_a_page_in_two_places() -> None:
    tree = RadixTree(1, HitMode.PAGE)
    tree.insert([1, 2], [4, 5], 1)
    tree._held.remove(5)
    assert [finding.law for finding in tree.check()] == ["L6"]


def test_a_hit_with_more_pages_than_tokens_is_refused() -> None:
    tree = RadixTree(2, HitMode.TOKEN)
    hit = tree.match([1], 0)
    with pytest.raises(InvalidInput, match="1 pages for 1 tokens, got 0 pages"):
        type(hit)((), 1, 0, page_size=2)
