"""Two operations as plain torch, compiled by ``torch.compile``.

    cpkv check examples/compiled_kernels.py

What a compiler makes of right code is another program, and so worth a check of its own. On a GPU code is
generated. On a CPU the graph is taken and run as it is, which still shows what tracing got wrong: a C++
compiler would take seconds for each of the many variants. ``BACKEND=inductor`` in the environment takes them.
"""

from __future__ import annotations

import os

import torch

BACKEND = os.environ.get("BACKEND", "inductor" if torch.cuda.is_available() else "aot_eager")

# Every new layout is a variant to compile. An engine has one; what is declared here, it must keep to.
CAPABILITIES = {"owner_mask": {"contiguous": True}, "lse_merge": {"contiguous": True}}

# The kit tries more shapes than a server has, and with more variants than this torch gives up.
torch._dynamo.config.recompile_limit = 256


@torch.compile(backend=BACKEND, dynamic=True, fullgraph=True)
def owner_mask(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
    """O1: which slots a rank owns; −1 is nobody's."""
    return (slots >= 0) & (slots // page_size % world_size == rank)


@torch.compile(backend=BACKEND, dynamic=True, fullgraph=True)
def lse_merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A6: attention over all keys, from its results over parts of them."""
    wide = lses.to(torch.float64 if lses.dtype == torch.float64 else torch.float32)
    most = wide.amax(0)
    # Where no part has keys, −inf − −inf would be NaN.
    weights = (wide - most.masked_fill(most == -torch.inf, 0)).exp()
    total = weights.sum(0)
    # A part without keys may hold NaN, which a weight of 0 would not remove.
    parts = outs.to(wide.dtype).masked_fill((lses == -torch.inf)[..., None], 0)
    out = (parts * weights[..., None]).sum(0) / total.masked_fill(total == 0, 1)[..., None]
    return out.to(outs.dtype), (most + total.log()).masked_fill(total == 0, -torch.inf).to(lses.dtype)
