"""Wrong admissions and settings that should have been refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from properties.mutants.mutant import Right, mutant
from refmodel.config import ServingConfig
from refmodel.layout.geometry import coverage
from refmodel.serving import admission
from refmodel.serving.admission import Caps


@mutant(admission.admit, "adm-01", "G2", source="derived from the fork's history")
def hard_cap(right: Right, waiting: Sequence[int], caps: Caps, page_size: int, **options: Any) -> int:
    """The cap holds for a lone request too: one that is larger waits for ever."""
    if waiting and caps.max_tokens and coverage(waiting[0], page_size) > caps.max_tokens:
        return 0
    return right(waiting, caps, page_size, **options)


@mutant(admission.admit, "adm-02", "G2", source="reported in sglang#22495")
def counted_unaligned(
    right: Right, waiting: Sequence[int], caps: Caps, page_size: int, **options: Any
) -> int:
    """Tokens are counted, not the slots of their pages: more are admitted than there are pages for."""
    return right(waiting, caps, 1, **options)


@mutant(admission.chunk_end, "adm-03", "G4", source="reported in sglang#23621")
def grown_by_a_quarter(prefix: int, remaining: int, chunk_size: int, page_size: int) -> int:
    """A chunk grows by a quarter and ends wherever that is: not at a page."""
    return prefix + min(remaining, chunk_size * 5 // 4)


@mutant(admission.admit, "flag-widens-every-batch", "G1")
def flag_widens_every_batch(
    right: Right, waiting: Sequence[int], caps: Caps, page_size: int, *, batch_flag: bool, shared_kv: bool
) -> int:
    """The batch flag widens batches without shared KV too."""
    return right(waiting, caps, page_size, batch_flag=batch_flag, shared_kv=True)


@mutant(admission.admit, "batch-flag-ignored", "G1")
def flag_ignored(
    right: Right, waiting: Sequence[int], caps: Caps, page_size: int, *, batch_flag: bool, shared_kv: bool
) -> int:
    """Shared-KV batches are wide whether the flag is on or not."""
    return right(waiting, caps, page_size, batch_flag=True, shared_kv=shared_kv)


@mutant(admission.admit, "bytes-estimated", "G3")
def bytes_estimated(right: Right, waiting: Sequence[int], caps: Caps, page_size: int, **options: Any) -> int:
    """The scheduler guesses the bytes of a batch and holds it to a gigabyte."""
    guess = (1 << 30) // (656 + 132)
    tightest = min(caps.max_tokens or guess, guess)
    return right(waiting, Caps(caps.max_requests, tightest), page_size, **options)


@mutant(admission.admit, "smaller-one-let-past", "G2")
def smaller_one_let_past(
    right: Right, waiting: Sequence[int], caps: Caps, page_size: int, **options: Any
) -> int:
    """Requests are counted that fit if a large one is passed over, but it is the first so many that go in."""
    return right(sorted(waiting), caps, page_size, **options)


@mutant(admission.chunk_end, "multiples-from-the-prefix", "G4")
def multiples_from_the_prefix(
    right: Right, prefix: int, remaining: int, chunk_size: int, page_size: int
) -> int:
    """Chunks are page multiples long: behind a prefix inside a page they end inside one."""
    return prefix + right(0, remaining, chunk_size, page_size)


@mutant(ServingConfig._check_backend, "slicing-backend-let-in", "T6", "X1")
def any_backend(self: ServingConfig) -> None:
    """A backend that can only slice by order is let in with shared KV."""


@mutant(ServingConfig._check_split, "round-robin-let-in", "X1")
def any_split(self: ServingConfig) -> None:
    """Round-robin is let in with shared KV."""


@mutant(ServingConfig._check_role, "shared-kv-on-decode", "X1")
def any_role(self: ServingConfig) -> None:
    """Decode servers are let in with shared KV."""


@mutant(ServingConfig._check_decode_page_size, "pd-06", "X1", source="reported in sglang#14439")
def any_decode_page_size(self: ServingConfig) -> None:
    """Prefill and decode start with different page sizes."""


@mutant(ServingConfig._check_shared_kv_is_on, "batch-flag-without-shared-kv", "X1")
def flag_without_shared_kv(self: ServingConfig) -> None:
    """The batch flag is taken although the flag it needs is absent."""


@mutant(ServingConfig.__post_init__, "layout-rewritten-at-start-up", "X1")
def layout_rewritten(right: Right, self: ServingConfig) -> None:
    """A host layout that the copy engine cannot read is silently changed to one that it can."""
    object.__setattr__(self, "host_layout", type(self.host_layout).LAYER_FIRST)
    right(self)
