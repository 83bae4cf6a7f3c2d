"""Law H2: slots of a copy are whole pages on both sides, or nothing is accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.refusals import refusal
from refmodel.errors import InvalidInput
from refmodel.serving.page_groups import PagePairs, check_page_groups

P = 64
CORRUPTIONS: tuple[Callable[[list[int], int, int], list[int]], ...] = (
    lambda slots, at, by: slots,
    lambda slots, at, by: [s + 1 + by for s in slots],  # shifted
    lambda slots, at, by: [*slots[:at], slots[at] + 1 + by, *slots[at + 1 :]],  # one slot off
    lambda slots, at, by: [*slots[:at], -1 - by, *slots[at + 1 :]],
    lambda slots, at, by: slots[::-1],
    lambda slots, at, by: slots[:at],
    lambda slots, at, by: [*slots, *slots[: 1 + by]],
    lambda slots, at, by: slots[by + 1 :] + slots[: by + 1],  # begun in the middle
    lambda slots, at, by: [*slots[at:], *slots[:at]],
    lambda slots, at, by: [*slots[::2], *slots[1::2]],  # interleaved
)
corruptions = st.sampled_from(CORRUPTIONS)


def slots_of(pages: list[int], page_size: int) -> list[int]:
    return [page * page_size + offset for page in pages for offset in range(page_size)]


def first_bad_group(slots: list[int], page_size: int) -> int | None:
    """Slow and plain."""
    seen: list[int] = []
    for group in range(0, len(slots), page_size):
        page = slots[group] // page_size
        if slots[group : group + page_size] != slots_of([page], page_size) or page < 0 or page in seen:
            return group // page_size
        seen.append(page)
    return None


@st.composite
def sides(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """(P, host slots, device slots): whole pages, of which either side may be spoilt."""
    page_size = draw(st.sampled_from([1, 2, 3, 4]))
    pages = st.lists(st.integers(0, 5), min_size=1, max_size=5)
    first = draw(pages)
    both = [slots_of(side, page_size) for side in (first, draw(pages)[: len(first)])]
    host, device = (
        draw(corruptions)(side, draw(st.integers(0, len(side) - 1)), draw(st.integers(0, 2))) for side in both
    )
    return page_size, host, device


@proves("H2")
@given(sides(), st.sampled_from([torch.int32, torch.int64]))
def test_only_whole_pages_pass_and_the_first_bad_group_is_named(
    drawn: tuple[int, list[int], list[int]], dtype: torch.dtype
) -> None:
    page_size, host, device = drawn
    bad = [
        (group, order, side)
        for order, (side, slots) in enumerate((("host", host), ("device", device)))
        if (group := first_bad_group(slots, page_size)) is not None
    ]

    def check() -> PagePairs:
        return check_page_groups(
            torch.tensor(host, dtype=dtype), torch.tensor(device, dtype=dtype), page_size
        )

    if bad:
        group, _, side = min(bad)
        assert refusal(check).startswith(f"group {group} of {side} slots")
    elif len(host) != len(device):
        assert "one a host page" in refusal(check)
    else:
        pairs = check()
        assert slots_of(list(pairs.host), page_size) == host
        assert slots_of(list(pairs.device), page_size) == device


def run(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


BAD = {
    "shifted": (run(1, 65), 0, "a multiple of 64, got 1"),
    "torn": ([*run(64, 127), 128], 0, "ascend by 1, got 126, then 128"),
    "reversed": (run(0, 64)[::-1], 0, "a multiple of 64, got 63"),
    "interleaved": (
        [s for pair in zip(run(0, 64), run(64, 128), strict=True) for s in pair],
        0,
        "0, then 64",
    ),
    "63 slots": (run(0, 63), 0, "a whole page, got 63 of them"),
    "65 slots": (run(0, 65), 1, "a whole page, got 1 of them"),
    "negative": ([*run(64, 128), *run(-64, 0)], 1, "slots >= 0, got -64"),
    "−1 in the middle": ([*run(64, 96), -1, *run(97, 128)], 0, "slots >= 0, got -1"),
    "duplicate": ([*run(64, 128), *run(0, 64), *run(64, 128)], 2, "each page once, got page 1 again"),
    "second group shifted": ([*run(64, 128), *run(130, 194)], 1, "a multiple of 64, got 130"),
}


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("name", BAD)
def test_bad_groups_are_refused_on_either_side(name: str, side: str) -> None:
    slots, group, why = BAD[name]
    bad, good = torch.tensor(slots), torch.arange(P * 3)
    host, device = (bad, good) if side == "host" else (good, bad)
    with pytest.raises(InvalidInput) as refused:
        check_page_groups(host, device, P)
    assert str(refused.value).startswith(f"group {group} of {side} slots: expected ")
    assert why in str(refused.value)


@pytest.mark.parametrize("slots", [torch.zeros(64), torch.arange(128).view(2, 64), torch.arange(64) > 0])
def test_slots_are_a_row_of_integers(slots: torch.Tensor) -> None:
    with pytest.raises(InvalidInput, match="host slots: expected integers"):
        check_page_groups(slots, torch.arange(64), P)


def test_no_slots_are_no_pages() -> None:
    nothing = torch.arange(0)
    assert check_page_groups(nothing, nothing, P) == PagePairs((), ())


@pytest.mark.parametrize(
    ("host", "device", "why"),
    [
        ((1,), (1, 2), "one a host page, got 2"),
        ((1, 2), (3, 3), "device pages of a copy: expected each page once, got page 3 twice"),
        ((-1,), (3,), "host page: expected an integer >= 0, got -1"),
    ],
)
def test_pairs_of_pages_are_checked(host: tuple[int, ...], device: tuple[int, ...], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        PagePairs(host, device)
