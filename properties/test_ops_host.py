"""Operations between device and host (laws H1, H5): byte by byte, and what survives."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.kernels.cases.host import PageCopy
from properties.op_checks import (
    any_case,
    copied,
    judged,
)
from properties.proofs import proves
from refmodel.ops.host import PAGE_COPY
from refmodel.ops.op import Cost, Results


def test_the_cost_is_each_byte_read_and_written() -> None:
    case = PageCopy(layers=2, local_pages=4, pool_pages=5, copied=3, page=2, width=3)
    assert PAGE_COPY.cost(**case.arguments()) == Cost(2 * 3 * 2 * 6)


def place(case: PageCopy, layer: int, page: int, offset: int) -> tuple[int, ...]:
    """Where a token of a host page begins, as the table of H6 has it."""
    slot = page * case.page + offset
    return {
        "layer_first": (layer, slot),
        "page_first": (slot, layer),
        "page_first_direct": (page, layer, offset),
    }[case.layout]


def copied_by_hand(case: PageCopy) -> tuple[torch.Tensor, torch.Tensor]:
    """(device, host) after the copy, token by token."""
    given = case.arguments()
    device, host = given["device"], given["host"]
    for one, other in zip(given["device_pages"].tolist(), given["host_pages"].tolist(), strict=True):
        for layer in range(case.layers):
            for offset in range(case.page):
                token = slice(offset * case.width, (offset + 1) * case.width)
                there = place(case, layer, other, offset)
                if case.to_host:
                    host[there] = device[layer, one, token]
                else:
                    device[layer, one, token] = host[there]
    return device, host


@proves("H1", "H5")
@given(any_case(PAGE_COPY))
def test_named_pages_are_copied_and_nothing_else_is_touched(case: PageCopy) -> None:
    given = case.arguments()
    assert PAGE_COPY.reference(**given) == ()
    device, host = copied_by_hand(case)
    assert torch.equal(given["device"], device)
    assert torch.equal(given["host"], host)


@proves("H1")
@given(any_case(PAGE_COPY))
def test_there_and_back_is_the_identity(case: PageCopy) -> None:
    given, before = case.arguments(), case.arguments()
    PAGE_COPY.reference(**given | {"to_host": 1})
    written = {"device": torch.zeros_like(given["device"])}
    back = copied(given) | written | {"to_host": 0}
    PAGE_COPY.reference(**back)
    pages = given["device_pages"]
    assert torch.equal(back["device"][:, pages], before["device"][:, pages])
    untouched = torch.ones(case.local_pages, dtype=torch.bool)
    untouched[pages] = False
    assert not back["device"][:, untouched].any()


@proves("H1")
@given(any_case(PAGE_COPY), st.booleans())
def test_strides_of_others_are_respected(case: PageCopy, strided_host: bool) -> None:
    given, right = case.arguments(), case.arguments()
    PAGE_COPY.reference(**right)
    name = "host" if strided_host else "device"
    buffer = torch.zeros(*given[name].shape[:-1], 2 * given[name].shape[-1], dtype=torch.uint8)
    view = buffer[..., ::2]
    view.copy_(given[name])
    PAGE_COPY.reference(**given | {name: view})
    assert torch.equal(view, right[name])
    assert not buffer[..., 1::2].any()


@proves("H1", "H5")
@given(any_case(PAGE_COPY), st.data())
@settings(max_examples=60)
def test_one_wrong_byte_shows_and_says_whose_it_is(case: PageCopy, data: st.DataObject) -> None:
    side = data.draw(st.sampled_from(["device", "host"]))
    given = case.arguments()
    byte = data.draw(st.integers(0, given[side].numel() - 1))

    def kernel(**given: Any) -> Results:
        PAGE_COPY.reference(**given)
        given[side].view(-1)[byte] ^= 0xFF
        return ()

    # Bytes of pages that are copies are H1's, all others must survive.
    marked = case.arguments()
    PAGE_COPY.reference(**marked)
    before = {name: torch.zeros_like(given[name]) for name in ("device", "host")}
    source = "device" if case.to_host else "host"
    PAGE_COPY.reference(**given | before | {source: torch.ones_like(given[source])})
    copies = before[side].view(-1)[byte] == 1 and side != source
    finding = judged(case, kernel)
    assert finding is not None
    assert finding.law == ("H1" if copies else "H5")
