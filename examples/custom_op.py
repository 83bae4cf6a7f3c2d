"""Operations behind ``torch.library``: an adapter of a few lines between a custom op and the kit.

    cpkv check examples/custom_op.py

An engine registers its kernels under names and with schemas of its own. The adapter maps the arguments of an
operation to that schema. ``torch.library.opcheck`` and the kit ask different things: the one whether the
registration is true (schema, mutation, shapes of fake tensors), the other whether the result is right.
:data:`OPCHECKED` has arguments for the first.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("cpkv_example::store_rows", mutates_args={"cache"})
def store_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows into the slots of one rank's cache; a slot of −1 is another rank's (O3)."""
    mine = slots >= 0  # −1 as an index would be the last row
    cache[slots[mine].long()] = rows[mine]


@torch.library.custom_op("cpkv_example::load_rows", mutates_args=())
def load_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows at slots of one rank's cache."""
    return cache[slots.long()]


@load_rows.register_fake
def _(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache.new_empty(len(slots), cache.shape[1])


def mla_write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """O3, F2: as the catalogue has it; the custom op takes its arguments in another order."""
    torch.ops.cpkv_example.store_rows(cache, rows, slots)


def mla_read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """F2."""
    rows: torch.Tensor = torch.ops.cpkv_example.load_rows(cache, slots)
    return rows


OPCHECKED = (
    (store_rows, (torch.zeros(8, 4), torch.ones(3, 4), torch.tensor([5, -1, 2]))),
    (load_rows, (torch.ones(8, 4), torch.tensor([5, 0]))),
)
