"""Law T5: the bytes that decode holds are those of the replicated cache, and no others change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import FORMATS
from properties.transfer_jobs import Job, jobs
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import PageTable, to_physical
from refmodel.serving.transfer import Message, Pair, destination_pages, put_pages, take_pages
from refmodel.storage.baseline import empty_replica
from refmodel.storage.formats import Format
from refmodel.storage.identity import Cache, pack
from refmodel.storage.shard import Shard, destinations, empty_shard


class Prefill:
    """The shards of all ranks and the replicated baseline beside them, of one cache."""

    def __init__(self, job: Job, cache: Cache, row_format: Format) -> None:
        W, local_pages = job.grid.world_size, 1 + max(job.pages) // job.grid.world_size
        self.job, self.cache, self.format = job, cache, row_format
        self.shards = [empty_shard(job.grid, rank, row_format, local_pages) for rank in range(W)]
        self.replica = empty_replica(job.grid.page_size, row_format, local_pages * W)
        self.decode = empty_shard(Grid(1, job.grid.page_size), 0, row_format, 1 + max(job.decode_pages))

    def forward(self, start: int, end: int) -> None:
        """Write positions [start, end)."""
        positions, pages = torch.arange(start, end), torch.tensor(self.job.pages)
        rows = self.format.encode(pack(request=0, position=positions, layer=0, cache=self.cache, write=0))
        slots = PageTable(pages, self.job.grid).slots(positions)
        for shard in self.shards:
            physical = to_physical(slots, shard.rank, self.job.grid)
            shard.write(destinations(physical, shard.num_slots, shard.rank), rows)
        self.replica.write(pages, start, rows)


@proves("T5")
@settings(max_examples=60)
@given(jobs(), st.sampled_from(FORMATS), st.sampled_from(FORMATS), st.data())
def test_decode_holds_the_bytes_of_the_replicated_cache(
    job: Job, kv: Format, index: Format, data: st.DataObject
) -> None:
    caches = [Prefill(job, Cache.KV, kv), Prefill(job, Cache.INDEX, index)]
    senders, receiver, start = job.senders(), job.receiver(), 0
    on_the_way: list[tuple[Message, list[torch.Tensor]]] = []
    for end in job.ends:
        for cache in caches:
            cache.forward(start, end)
        for sender in senders:
            message = sender.send(job.pages, end, is_last=end == job.tokens, written=end)
            taken = [take_pages(cache.shards[message.rank], message.pairs) for cache in caches]
            on_the_way.append((message, taken))
        start = end
    for message, taken in data.draw(st.permutations(on_the_way)):
        places = receiver.accept(message)
        for cache, pages in zip(caches, taken, strict=True):
            put_pages(cache.decode, places, pages)
    assert receiver.done()
    for cache in caches:
        whole = cache.replica.view([(torch.tensor(job.pages), job.tokens)])
        slots = PageTable(torch.tensor(job.decode_pages), Grid(1, job.grid.page_size)).slots(
            torch.arange(job.tokens)
        )
        assert torch.equal(cache.decode.rows[slots], whole)


@proves("T5")
@given(jobs(), st.sampled_from(FORMATS))
def test_pages_that_nobody_sent_keep_their_bytes(job: Job, row_format: Format) -> None:
    cache = Prefill(job, Cache.KV, row_format)
    cache.forward(0, job.tokens)
    before = cache.decode.pages.clone()
    for message in job.messages():
        places = destination_pages(job.decode_pages, message.pairs)
        put_pages(cache.decode, places, take_pages(cache.shards[message.rank], message.pairs))
    others = sorted(set(range(len(before))) - set(job.decode_pages))
    assert torch.equal(cache.decode.pages[others], before[others])


def small_shard() -> Shard:
    return empty_shard(Grid(1, 2), 0, FORMATS[0], 3, poison=0)


@pytest.mark.parametrize("page", [0, 3])
def test_pages_that_a_shard_has_not_are_neither_read_nor_written(page: int) -> None:
    shard = small_shard()
    with pytest.raises(InvalidInput, match=rf"1 … 2; 0 is the dummy page, got {page} \(rank 0\)"):
        take_pages(shard, [Pair(page, 0)])
    with pytest.raises(InvalidInput, match=rf"1 … 2; 0 is the dummy page, got {page} \(rank 0\)"):
        put_pages(shard, [1, page], torch.ones(2, 16, dtype=torch.uint8))
    assert not shard.pages.any()


def test_pages_of_another_size_are_not_written() -> None:
    shard = small_shard()
    with pytest.raises(InvalidInput, match=r"expected \[1, 16\], got \[1, 8\]"):
        put_pages(shard, [1], torch.ones(1, 8, dtype=torch.uint8))
    assert not shard.pages.any()
