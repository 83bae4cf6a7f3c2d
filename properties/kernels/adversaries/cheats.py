"""Kernels that are wrong in ways of any operation: they cheat, or break the process. One for each rule.

All are of ``rerange`` or ``logical_to_physical``, right but for the fault that the docstring says.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import time
from typing import Any

import torch

from properties.kernels import faults
from properties.kernels.adversaries.adversary import adversary
from refmodel.ops.declare import kernel
from refmodel.ops.layout import LOGICAL_TO_PHYSICAL, RERANGE

Tensor = torch.Tensor
Ints = tuple[int, ...]

# A process that lives on remembers: what a cheat may use.
_memory: dict[Any, Tensor] = {}
_count = itertools.count()


def _rerange(buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Tensor:
    return RERANGE.reference(buffers, prefixes, tokens, world_size, page_size)[0]


def _physical(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    return LOGICAL_TO_PHYSICAL.reference(slots, rank, world_size, page_size)[0]


# -- answers that nobody has worked out --------------------------------------------------------------------


@adversary("rerange", law="S4")
def zeros(buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Tensor:
    """Zeros."""
    return buffers.new_zeros(sum(tokens), *buffers.shape[1:])


@adversary("rerange", law="S4")
def not_a_number(buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Tensor:
    """NaN everywhere, where there can be."""
    rows = torch.zeros(sum(tokens), *buffers.shape[1:], dtype=buffers.dtype)
    return rows.fill_(float("nan")) if buffers.is_floating_point() else rows


@adversary("logical_to_physical", kind=faults.SHARED)
def its_input(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """The argument itself comes back."""
    return slots


@adversary("rerange", law="S4")
def whatever_was_there(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """Memory as it is: right if the reference has just left its answer there."""
    return torch.empty(sum(tokens), *buffers.shape[1:], dtype=buffers.dtype)


@adversary("rerange", law="S4")
def found_in_the_heap(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """Any tensor of this process that looks like the answer."""
    shape = (sum(tokens), *buffers.shape[1:])
    for thing in gc.get_objects():
        if type(thing) is Tensor and tuple(thing.shape) == shape and thing.dtype == buffers.dtype:
            return thing.clone()
    return buffers.new_zeros(shape)


@adversary("rerange", law="S4")
def the_last_answer(buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Tensor:
    """Worked out once for each shape, and remembered."""
    key = (buffers.shape, buffers.dtype, prefixes, tokens, world_size, page_size)
    if key not in _memory:
        _memory[key] = _rerange(buffers, prefixes, tokens, world_size, page_size)
    return _memory[key].clone()


@adversary("rerange", law="S4")
def the_answer_for_these_tensors(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """Remembered by where the argument lies in memory, whatever is in it now."""
    key = (buffers.data_ptr(), buffers.shape, prefixes, tokens, world_size, page_size)
    if key not in _memory:
        _memory[key] = _rerange(buffers, prefixes, tokens, world_size, page_size)
    return _memory[key].clone()


@adversary("rerange", law="S4")
def never_written(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int, *, out: Tensor
) -> None:
    """The last row of ``out`` stays as it is."""
    out[:-1] = _rerange(buffers, prefixes, tokens, world_size, page_size)[:-1]


# -- memory of others --------------------------------------------------------------------------------------


@adversary("logical_to_physical", kind=faults.CHANGED)
def mutates_its_input(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Right, but the argument is used as scratch space."""
    result = _physical(slots, rank, world_size, page_size)
    slots.copy_(result)
    return result


@adversary("rerange", kind=faults.OUTSIDE)
def past_the_end(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int, *, out: Tensor
) -> None:
    """Writes one row more than there is."""
    out.copy_(_rerange(buffers, prefixes, tokens, world_size, page_size))
    step = out.stride(0) if out.ndim else 1
    more = out.as_strided((1, *out.shape[1:]), out.stride(), out.storage_offset() + len(out) * step)
    more.zero_()


@adversary("rerange", kind=faults.OVERWRITTEN)
def one_buffer_for_all_answers(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """Right, but every call returns the same memory."""
    result = _rerange(buffers, prefixes, tokens, world_size, page_size)
    return _memory.setdefault((result.shape, result.dtype), torch.empty_like(result)).copy_(result)


# -- other shapes, types, ways -----------------------------------------------------------------------------


@adversary("logical_to_physical", kind=faults.DTYPE)
def always_int64(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """int64, whatever the type of the argument."""
    return _physical(slots, rank, world_size, page_size).long()


@adversary("logical_to_physical", kind=faults.SHAPE)
def a_column(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """[n, 1] in place of [n]."""
    return _physical(slots, rank, world_size, page_size)[:, None]


@adversary("logical_to_physical", kind=faults.RESULTS)
def two_results(slots: Tensor, rank: int, world_size: int, page_size: int) -> tuple[Tensor, Tensor]:
    """A second result that nobody asked for."""
    result = _physical(slots, rank, world_size, page_size)
    return result, result >= 0


@adversary("rerange", law="S4")
def flat_memory(buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Tensor:
    """Right only for contiguous inputs: elements are read as if one followed the other."""
    flat = buffers.as_strided(buffers.shape, torch.empty(buffers.shape).stride(), buffers.storage_offset())
    return _rerange(flat, prefixes, tokens, world_size, page_size)


@adversary("logical_to_physical", law="O2")
@kernel("logical_to_physical", page_sizes=(64, 48))
def shifts_for_pages_of_48(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Declares pages of 48 tokens, and computes with shifts: right for powers of two."""
    bits = page_size.bit_length() - 1
    page, offset = slots >> bits, slots & (page_size - 1)
    mine = (page % world_size == rank) & (slots >= 0)
    return torch.where(mine, (page // world_size << bits) + offset, -1)


@adversary("rerange", kind=faults.REPEAT)
@kernel("rerange", deterministic=True)
def now_and_then(buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Tensor:
    """Declared deterministic, and wrong in every seventh call only."""
    result = _rerange(buffers, prefixes, tokens, world_size, page_size)
    return result.roll(1, 0) if next(_count) % 7 == 5 else result


# -- no answer ---------------------------------------------------------------------------------------------


@adversary("logical_to_physical", kind=faults.RAISES)
def refuses_nothing(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Raises if there are no slots."""
    if not len(slots):
        raise ValueError("no slots")
    return _physical(slots, rank, world_size, page_size)


@adversary("logical_to_physical", kind=faults.RAISES)
def leaves(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Ends the program as Python does: that is an exception."""
    raise SystemExit(0)


@adversary("logical_to_physical", kind=faults.CRASH)
def segfaults(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Reads address 0 if there are more than 100 slots."""
    if len(slots) > 100:
        ctypes.string_at(0)
    return _physical(slots, rank, world_size, page_size)


@adversary("logical_to_physical", kind=faults.CRASH)
def exits(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Ends the process, and says that all is well."""
    os._exit(0)


@adversary("logical_to_physical", kind=faults.HANG)
def hangs(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Never comes back if there is one slot."""
    while len(slots) == 1:
        time.sleep(1)
    return _physical(slots, rank, world_size, page_size)
