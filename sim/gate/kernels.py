"""What a gate run did with a target's kernels: a line an operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from refmodel.ops.catalogue import OPS
from sim.kernels.loading import Named
from sim.kernels.seams.catalogue import SEAMS
from sim.kernels.uses import Uses

# Alone only: the reference does it nowhere by itself, so that `cpkv check` is all there is.
Place = Literal["in place", "the reference's", "alone only"]


class KernelUse(msgspec.Struct, frozen=True):
    """One operation of the catalogue."""

    op: str
    place: Place
    calls: int = 0  # of the kernel, by all ranks
    left: int = 0  # to the reference, as the kernel does not declare them or the operation cannot say them

    @property
    def words(self) -> str:
        """``in place, 340 calls; 12 left to the reference``"""
        if self.place == "alone only":
            return "alone only: the whole has no place for it; see `cpkv check`"
        if self.place == "the reference's":
            return "the reference's"
        left = f"; {self.left:,} left to the reference" if self.left else ""
        if not self.calls:
            return f"in place, never called{left}"
        return f"in place, {self.calls:,} call{'s' if self.calls > 1 else ''}{left}"


class KernelUses(msgspec.Struct, frozen=True):
    """A target in a gate run."""

    target: str
    ops: list[KernelUse]


def kernel_uses(named: Named, uses: Uses) -> KernelUses:
    """Of each operation: those of the target first."""
    return KernelUses(named.text, sorted(_uses(named, uses), key=lambda use: use.place == "the reference's"))


def _uses(named: Named, uses: Uses) -> Iterator[KernelUse]:
    for op in OPS:
        if op not in named.target.candidates:
            yield KernelUse(op, "the reference's")
        elif op not in SEAMS:
            yield KernelUse(op, "alone only")
        else:
            yield KernelUse(op, "in place", uses.calls.get(op, 0), uses.left.get(op, 0))
