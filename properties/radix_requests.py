"""Requests served over a radix tree, with every row that they cache written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from refmodel.layout.geometry import num_pages
from refmodel.serving.radix import HitMode, RadixTree
from refmodel.serving.request_pages import copy_on_write, end_of_chunk

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


either = st.booleans()
