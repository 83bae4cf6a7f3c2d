"""A request's own list of pages, where it meets the radix tree: end of chunk, and shared tails (laws L5, L6).

>>> from refmodel.serving.radix import HitMode
>>> tree = RadixTree(page_size=2, mode=HitMode.TOKEN)
>>> end_of_chunk(tree, [1, 2, 3, 4], pages=[4, 5], now=1).pages
(4, 5)
>>> end_of_chunk(tree, [1, 2, 3, 4, 5], pages=[6, 7, 8], now=2)
ChunkEnd(pages=(4, 5, 8), duplicates=(6, 7), adopted=(), node=1)
>>> copy_on_write([4, 5, 8], valid=3, is_held=tree.holds, page_size=2)
1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import num_pages, tail
from refmodel.layout.placement import page_lanes
from refmodel.layout.plan import Plan
from refmodel.serving.page_keys import Tokens
from refmodel.serving.radix import RadixTree


@dataclass(frozen=True, slots=True)
class ChunkEnd:
    """A request after a chunk. Lock ``node`` before the node of the last chunk is unlocked."""

    pages: tuple[int, ...]  # the request's from now on: the tree's, then its own tail
    duplicates: tuple[int, ...]  # to free, once
    adopted: tuple[int, ...]  # the tree's from now on
    node: int


def end_of_chunk(tree: RadixTree, tokens: Tokens, pages: Sequence[int], now: int) -> ChunkEnd:
    """Insert the page-aligned part of a running request, and rebind it to the tree's pages (L6).

    Their owners can differ from the request's own plan. The unaligned tail stays with the request. Errors:
    those of :meth:`RadixTree.insert`.
    """
    inserted = tree.insert(tokens, pages, now)
    return ChunkEnd(inserted.pages + inserted.rest, inserted.duplicates, inserted.adopted, inserted.node)


def copy_on_write(
    pages: Sequence[int], valid: int, is_held: Callable[[int], bool], page_size: int
) -> int | None:
    """Position of the page that must be copied before the request writes at position ``valid``, or None (L5).

    ``is_held``: whether anybody but this request holds a page: the tree, or another request. Without a tail
    nothing is copied: the next token opens a page.
    """
    if len(pages) < num_pages(valid, page_size):
        expected = f"at least {num_pages(valid, page_size)} for {valid} tokens"
        raise InvalidInput("pages of a request", expected=expected, received=len(pages))
    position = valid // page_size
    return position if tail(valid, page_size) and is_held(pages[position]) else None


def copy_lane(plan: Plan, request: int) -> int:
    """Lane that the copy of a shared tail goes to: that of the rank which computes the page (L5)."""
    return int(page_lanes(plan, request)[0])
