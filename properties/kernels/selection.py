"""Which cases a candidate is tried with: those within what it declares, and each thing it declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

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
    sizes, widths, dtypes = capabilities.page_sizes, capabilities.widths, capabilities.dtypes
    return (
        (not sizes or case.page_size in (None, *sizes))
        and (not widths or case.row_width in (None, *widths))
        and (not dtypes or set(case.dtypes) <= set(dtypes))
    )


def corners(kind: type[Case], capabilities: Capabilities) -> list[Case]:
    """Those that fit; for a declared page size or width that none of them has, some are moved to it."""
    own = list(kind.corners())
    chosen = [case for case in own if fits(case, capabilities)]
    there = {(case.page_size, case.row_width) for case in chosen}
    for sizes in _declared(capabilities):
        if not any(_agree(sizes, other) for other in there):
            found = (case for case in moved(own, *sizes) if fits(case, capabilities))
            chosen += islice(found, _MOST_MOVED)
    return chosen


# Of a page, and of a row; None: not declared, or not known to the operation.
Sizes = tuple[int | None, int | None]


def _declared(capabilities: Capabilities) -> list[Sizes]:
    """Each page size with each width."""
    return list(product(capabilities.page_sizes or (None,), capabilities.widths or (None,)))


def _agree(sizes: Sizes, others: Sizes) -> bool:
    return all(None in both or both[0] == both[1] for both in zip(sizes, others, strict=True))


def moved(cases: list[Case], page_size: int | None, width: int | None) -> Iterator[Case]:
    """The cases that have a meaning with this page size and width, where they know such, and are small."""
    for case in cases:
        try:
            other = case
            if page_size is not None and case.page_size is not None:
                other = replace(other, page=page_size)  # type: ignore[call-arg]  # those that know pages
            if width is not None and case.row_width is not None:
                other = other.with_width(width) or other
            arguments = other.arguments()
            if other.op.collective or other.op.reference(**arguments) is not None:
                yield other
        except Exception:  # whatever a case of another size cannot do
            continue


def cases_of(kind: type[Case], capabilities: Capabilities) -> st.SearchStrategy[Case]:
    """Any case that fits."""
    drawn: st.SearchStrategy[Case] = kind.strategy()
    if capabilities.page_sizes or capabilities.widths:
        drawn = st.builds(_moved_to, drawn, st.sampled_from(_declared(capabilities)))
    return drawn.filter(lambda case: fits(case, capabilities))


def _moved_to(case: Case, sizes: Sizes) -> Case:
    """The case of these sizes, if it has a meaning; else as it is."""
    return case if _agree(sizes, (case.page_size, case.row_width)) else next(moved([case], *sizes), case)


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
    """Which declared page sizes, widths and dtypes no case had; empty if none is left."""
    sizes, widths = {case.page_size for case in cases}, {case.row_width for case in cases}
    dtypes = {dtype for case in cases for dtype in case.dtypes}
    missing = [
        f"{what} {size}"
        for what, declared, had in (
            ("page size", capabilities.page_sizes, sizes),
            ("width", capabilities.widths, widths),
        )
        for size in declared
        if had != {None} and size not in had
    ]
    missing += [
        str(dtype).removeprefix("torch.") for dtype in capabilities.dtypes if dtypes and dtype not in dtypes
    ]
    return ", ".join(missing)
