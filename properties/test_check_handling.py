"""How tensors are handed over: guarded, poisoned, in few ways that stand for all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.kernel_trials import ALONE, candidate_of
from properties.kernels.guarded import guarded, stain
from properties.kernels.handling import PLAIN, Views, all_handlings, few_handlings
from refmodel.ops.catalogue import OPS


@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]),
    views=st.sampled_from(Views),
    poison=st.sampled_from([0, 1]),
    data=st.data(),
)
def test_a_byte_written_around_the_elements_shows_and_one_in_them_does_not(
    shape: tuple[int, ...], dtype: torch.dtype, views: Views, poison: int, data: st.DataObject
) -> None:
    place = guarded(shape, dtype, views, poison=poison)
    assert tuple(place.view.shape) == shape
    place.fill(torch.ones(shape, dtype=dtype))
    assert not place.changed
    assert not place.strays()
    before = place.buffer.clone()
    place.view.zero_()
    assert not place.strays()
    assert place.changed == bool(place.view.numel())
    theirs = (place.buffer != before).nonzero()[:, 0].tolist()
    byte = data.draw(st.integers(0, place.buffer.numel() - 1).filter(lambda n: n not in theirs))
    inside = 0 <= byte - place.first < (max(theirs) if theirs else 0) and dtype not in (
        torch.uint8,
        torch.bool,
    )
    place.buffer[byte] += 1
    if not inside:  # an element's other bytes are the element's
        assert place.strays()


@pytest.mark.parametrize("op", ALONE)
def test_few_ways_of_handing_over_have_each_pair_of_two(op: str) -> None:
    candidate = candidate_of(OPS[op].reference, op)
    every, few = list(all_handlings(candidate)), few_handlings(candidate)
    assert few[0] == every[0] == PLAIN
    assert set(few) <= set(every)
    for way in every:
        for one in ("index", "views", "finite"):
            for other in ("index", "views", "finite"):
                wanted = getattr(way, one), getattr(way, other)
                assert any((getattr(each, one), getattr(each, other)) == wanted for each in few)


def test_poison_is_never_a_right_index_and_differs_between_runs() -> None:
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        first, second = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)
        stain(first, 0)
        stain(second, 1)
        assert not torch.equal(first, second)
        if dtype in (torch.int32, torch.int64):
            assert min(int(first), int(second)) > 2**28
