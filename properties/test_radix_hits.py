"""Laws L4, L5, L6: a hit is the longest there is, and its rows are the request's own, as long as it runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from properties.proofs import proves
from properties.radix_requests import (
    Served,
    either,
    empty_served,
    modes,
    page_sizes,
    prompts,
    served,
    steps,
    truth,
)
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import num_pages
from refmodel.serving.radix import HitMode, RadixTree


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


def test_a_hit_with_more_pages_than_tokens_is_refused() -> None:
    tree = RadixTree(2, HitMode.TOKEN)
    hit = tree.match([1], 0)
    with pytest.raises(InvalidInput, match="1 pages for 1 tokens, got 0 pages"):
        type(hit)((), 1, 0, page_size=2)
