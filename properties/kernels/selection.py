"""Which cases a candidate is tried with: those within what it declares, and each thing it declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from properties.kernels.cases.case import Case
from refmodel.ops.declare import Capabilities

_MOST_MOVED = 6  # corners that are tried with a page size of which there is none
QUIET = settings(
    database=None, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False
)


def fits(case: Case, capabilities: Capabilities) -> bool:
    """Whether a case asks for nothing beyond what is declared."""
    sizes, dtypes = capabilities.page_sizes, capabilities.dtypes
    return (not sizes or case.page_size in (None, *sizes)) and (not dtypes or set(case.dtypes) <= set(dtypes))


def corners(kind: type[Case], capabilities: Capabilities) -> list[Case]:
    """Those that fit; for a declared page size that none of them has, some are moved to it."""
    own = list(kind.corners())
    chosen = [case for case in own if fits(case, capabilities)]
    there = {case.page_size for case in chosen}
    if own and own[0].page_size is not None:
        for size in capabilities.page_sizes:
            if size not in there:
                chosen += [case for case in moved(own, size) if fits(case, capabilities)][:_MOST_MOVED]
    return chosen


def moved(cases: list[Case], page_size: int) -> Iterator[Case]:
    """The cases that have a meaning with pages of this size, and are small."""
    for case in cases:
        try:
            other = replace(case, page=page_size)  # type: ignore[call-arg]  # those that know pages
            arguments = other.arguments()
            if other.op.collective or other.op.reference(**arguments) is not None:
                yield other
        except Exception:  # whatever a case of another size cannot do
            continue


def cases_of(kind: type[Case], capabilities: Capabilities) -> st.SearchStrategy[Case]:
    """Any case that fits."""
    drawn: st.SearchStrategy[Case] = kind.strategy()
    sizes = capabilities.page_sizes
    if sizes:
        drawn = st.builds(_with_page, drawn, st.sampled_from(sizes))
    return drawn.filter(lambda case: fits(case, capabilities))


def _with_page(case: Case, page_size: int) -> Case:
    """The case with this page size, if it has a meaning; else as it is."""
    if case.page_size is None or case.page_size == page_size:
        return case
    return next(moved([case], page_size), case)


def some_cases(kind: type[Case], capabilities: Capabilities, count: int, seed: int) -> list[Case]:
    """So many drawn cases, small before large."""
    found: list[Case] = []

    @seeded(seed)
    @settings(QUIET, max_examples=count, phases=[Phase.generate])
    @given(cases_of(kind, capabilities))
    def draw(case: Case) -> None:
        found.append(case)

    try:
        draw()
    except Unsatisfiable:
        return []
    return sorted(set(found), key=size_of)


def size_of(case: Case) -> tuple[int, int, str]:
    """How large a case is: elements in its tensors; then how much there is to read."""
    tensors = [value for value in case.arguments().values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors), len(repr(case)), repr(case)


def untried(capabilities: Capabilities, cases: set[Case]) -> str:
    """Which declared page sizes and dtypes no case had; empty if none is left."""
    sizes = {case.page_size for case in cases}
    dtypes = {dtype for case in cases for dtype in case.dtypes}
    missing = [
        f"page size {size}" for size in capabilities.page_sizes if sizes != {None} and size not in sizes
    ]
    missing += [
        str(dtype).removeprefix("torch.") for dtype in capabilities.dtypes if dtypes and dtype not in dtypes
    ]
    return ", ".join(missing)
