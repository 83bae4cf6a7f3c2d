"""Law L8: the keys of a page are its tokens, or the pairs that begin with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.radix_requests import modes, page_sizes, prompts
from refmodel.errors import InvalidInput
from refmodel.serving.page_keys import PageKeys, token_bytes, tokens_of
from refmodel.serving.radix import HitMode, RadixTree


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
