"""Law L7: equal steps make equal trees, and a fingerprint tells trees apart."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.radix_requests import Served, either, modes, page_sizes, served, steps
from refmodel.serving.page_keys import TOKEN_BYTES, token_bytes
from refmodel.serving.radix import HitMode


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
