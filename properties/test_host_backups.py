"""Laws H4, H5: which pages are backed up, by whom, and which copies make room for others."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from properties.host_copies import filled, host_of
from properties.proofs import proves
from properties.refusals import refusal
from refmodel.layout.ownership import logical_page
from refmodel.serving.host_moves import backed_up_by
from refmodel.serving.write_policy import HitCounts, WritePolicy


@proves("H5")
@given(st.integers(1, 4), st.permutations(range(4, 24)), st.integers(0, 8), st.integers(0, 8))
def test_over_the_ranks_each_page_is_backed_up_once_by_its_owner(
    world_size: int, pages: list[int], first: int, count: int
) -> None:
    host = host_of(world_size, pages_per_lane=20)
    filled(host, list(range(first)), [page % world_size for page in pages[:first]])
    pages = pages[:count]
    fill = host.plan_backup(list(range(count)), pages, now=1)
    copied = Counter(
        logical_page(local, rank, world_size)
        for rank in range(world_size)
        for local in backed_up_by(rank, fill, pages, world_size).device
    )
    assert copied == Counter(pages[first:])  # those that were on the host already are not copied again


@proves("H5")
@given(st.sampled_from(list(WritePolicy)), st.lists(st.integers(0, 3), max_size=12))
def test_a_page_is_due_for_backup_once_by_its_policy(policy: WritePolicy, hits: list[int]) -> None:
    counts, due = HitCounts(policy), list[int]()
    for key in hits:
        due += [key for _ in counts.hit([key], due)]
    needed = {WritePolicy.WRITE_THROUGH: 1, WritePolicy.WRITE_THROUGH_SELECTIVE: 2}.get(policy)
    assert sorted(due) == sorted(key for key, n in Counter(hits).items() if needed and n >= needed)
    leaving = [0, 1, 2, 3]
    assert counts.leave(leaving, {1}) == ((0, 2, 3) if policy is WritePolicy.WRITE_BACK else ())
    assert counts.fingerprint() == ()


@proves("H4")
@given(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.sets(st.integers(0, 3)), st.integers(0, 4))
def test_pages_in_use_are_not_evicted_and_the_longest_unused_go_first(
    used: list[int], pinned: set[int], count: int
) -> None:
    host = host_of(1, pages_per_lane=4)
    for key, now in enumerate(used):
        filled(host, [key], [0], now)
    host.pin(sorted(pinned))
    by_use = sorted((now, -key) for key, now in enumerate(used) if key not in pinned)
    assert host.evict(0, count) == tuple(-key for _, key in by_use[:count])
    assert refusal(host.plan_prefetch, [10, 11, 12, 13, 14], [0] * 5, 9).startswith("host pages of lane 0")
    assert host.usable_prefix(sorted(pinned)) == len(pinned)
