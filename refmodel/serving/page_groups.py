"""Token indices of a copy between host and device: whole pages, or nothing moves (law H2).

Copies are asked for in slots: P of them a page, host and device side by side. Whoever moves pages takes every
P-th slot, so a group that is shifted, torn or out of order would be copied to wrong places without an error.

>>> check_page_groups(torch.arange(128, 256), torch.cat([torch.arange(448, 512), torch.arange(64, 128)]), 64)
PagePairs(host=(2, 3), device=(7, 1))
>>> check_page_groups(torch.arange(0, 64), torch.tensor([*range(64, 127), 128]), 64)
Traceback (most recent call last):
...
refmodel.errors.InvalidInput: group 0 of device slots: expected slots that ascend by 1, got 126, then 128
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class PagePairs:
    """Pages of one rank that a copy moves: page ``host[i]`` of its pool and ``device[i]`` of its shards.

    :class:`InvalidInput` for unequal lengths, negative pages, and a page that comes twice on a side.
    """

    host: tuple[int, ...]  # host pages
    device: tuple[int, ...]  # local pages

    def __post_init__(self) -> None:
        if len(self.host) != len(self.device):
            raise InvalidInput(
                "device pages of a copy",
                expected=f"{len(self.host)}, one a host page",
                received=len(self.device),
            )
        _check_pages(self.host, "host")
        _check_pages(self.device, "device")

    def __len__(self) -> int:
        return len(self.host)


def _check_pages(pages: Sequence[int], side: str) -> None:
    if pages and min(pages) < 0:
        raise InvalidInput(f"{side} page", expected="an integer >= 0", received=min(pages))
    if len(set(pages)) != len(pages):
        twice = next(page for i, page in enumerate(pages) if page in pages[:i])
        raise InvalidInput(
            f"{side} pages of a copy", expected="each page once", received=f"page {twice} twice"
        )


def check_page_groups(host: torch.Tensor, device: torch.Tensor, page_size: int) -> PagePairs:
    """Slots of both sides, each int32 or int64 [n] on the CPU → the pages that they are (H2).

    Slots i·P … (i+1)·P−1 are *group* i: they must be one page in order, and no page may come twice on a side.
    :class:`InvalidInput` names the first bad group and its side; of one number, the host's.
    """
    at_least(1, page_size, "page size P")
    faults = [
        (fault[0], order, side, fault[1:])
        for order, (side, slots) in enumerate((("host", host), ("device", device)))
        if (fault := _first_fault(slots, page_size, side)) is not None
    ]
    if faults:
        group, _, side, (expected, received) = min(faults)
        raise InvalidInput(f"group {group} of {side} slots", expected=expected, received=received)
    return PagePairs(_pages(host, page_size), _pages(device, page_size))


def _pages(slots: torch.Tensor, page_size: int) -> tuple[int, ...]:
    return tuple((slots[::page_size] // page_size).tolist())


def _first_fault(slots: torch.Tensor, page_size: int, side: str) -> tuple[int, str, str] | None:
    """(group, expected, received) of the first group of one side that is not a page; None if all are."""
    if slots.dim() != 1 or slots.dtype not in _INTEGERS:
        raise InvalidInput(
            f"{side} slots", expected="integers [n]", received=f"{slots.dtype} {list(slots.shape)}"
        )
    whole, rest = divmod(len(slots), page_size)
    groups = slots[: whole * page_size].view(-1, page_size).to(torch.int64)
    bad = _torn(groups) | _repeated(groups[:, 0])
    if bool(bad.any()):
        group = int(bad.int().argmax())
        return group, *_why(groups[group].tolist(), page_size)
    return (whole, f"{page_size} slots, a whole page", f"{rest} of them") if rest else None


def _torn(groups: torch.Tensor) -> torch.Tensor:
    """[groups] those that are not one page in order."""
    page_size = groups.shape[1]
    start = groups[:, :1]
    off = (groups != start + torch.arange(page_size)).any(1)
    return off | (start[:, 0] < 0) | (start[:, 0] % page_size != 0)


def _repeated(starts: torch.Tensor) -> torch.Tensor:
    """[groups] those whose first slot is that of a group before them."""
    _, which = starts.unique(return_inverse=True)
    numbers = torch.arange(len(starts))
    first = torch.full_like(numbers, len(starts)).scatter_reduce_(0, which, numbers, "amin")
    return first[which] != numbers


def _why(group: list[int], page_size: int) -> tuple[str, str]:
    """(expected, received) of a bad group."""
    if min(group) < 0:
        return "slots >= 0", str(min(group))
    if group[0] % page_size:
        return f"a first slot that is a multiple of {page_size}", str(group[0])
    for slot, following in pairwise(group):
        if following != slot + 1:
            return "slots that ascend by 1", f"{slot}, then {following}"
    return "each page once", f"page {group[0] // page_size} again"
