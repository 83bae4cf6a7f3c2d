"""Wrong transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.layout.geometry import Grid, ceil_div, num_pages
from refmodel.layout.ownership import local_page
from refmodel.serving import transfer
from refmodel.serving.receiver import Receiver, Registration
from refmodel.serving.transfer import Message, Pair, Sender
from refmodel.storage.shard import Shard


@mutant(transfer.pairs, "pd-01", "T2", "T3", source="reported in sglang#28718")
def filtered_by_page_number(
    pages: Sequence[int], first_position: int, rank: int, world_size: int
) -> tuple[Pair, ...]:
    """A rank sends a range of page numbers from the lowest on: scattered pages are in nobody's range."""
    share, lowest = ceil_div(len(pages), world_size), min(pages, default=0)
    mine = range(lowest + rank * share, lowest + (rank + 1) * share)
    numbered = enumerate(pages, first_position)
    return tuple(Pair(local_page(page, world_size), position) for position, page in numbered if page in mine)


@mutant(transfer.destination_pages, "pd-02", "T2", source="derived from the fork's history")
def destination_by_order(pages: Sequence[int], sent: Sequence[Pair]) -> tuple[int, ...]:
    """The pages of a message go to as many pages in a row: the owner's pages are taken for a slice."""
    first = sent[0].position if sent else 0
    return tuple((*pages[first:], *pages)[: len(sent)])


@mutant(transfer.chunk_pages, "pd-03", "T1", source="reported in sglang#5589")
def open_page_sent_early(right: Right, start_page: int, end: int, is_last: bool, page_size: int) -> range:
    """A chunk that ends inside a page sends that page, and what comes later never follows."""
    return right(start_page, max(end, start_page * page_size), True, page_size)


@mutant(Sender.send, "pd-04", "T4", source="reported in sglang#27004")
def index_counted_from_what_was_filled(
    right: Right, self: Sender, pages: Sequence[int], end: int, **options: Any
) -> Message:
    """The index list counts the first token of the answer: at a page edge it is one page too long."""
    message = right(self, pages, end, **options)
    filled = num_pages(end + 1, self._grid.page_size)
    if not message.is_last or filled == message.stop_page:
        return message
    return replace(message, index_pairs=(*message.index_pairs, Pair(1, message.stop_page)))


@mutant(Sender.send, "pd-05", "T3", "T5", source="reported in sglang#33970")
def sent_before_the_forward_is_finished(
    right: Right, self: Sender, pages: Sequence[int], end: int, *, is_last: bool, written: int
) -> Message:
    """Only the last chunk waits for its forward: the others send stale bytes."""
    return right(self, pages, end, is_last=is_last, written=written if is_last else end)


@mutant(Receiver.__init__, "pages-of-any-size", "X1")
def any_page_size(right: Right, self: Receiver, registration: Registration, prefill: Grid) -> None:
    """Decode takes pages of any size for pages of its own."""
    right(self, registration, Grid(prefill.world_size, registration.page_size))


@mutant(Sender.send, "pd-07", "T3")
def no_signal_without_pages(
    right: Right, self: Sender, pages: Sequence[int], end: int, **options: Any
) -> Message:
    """A rank that has nothing to send in the last chunk does not say that it is the last: decode waits."""
    message = right(self, pages, end, **options)
    return replace(message, is_last=message.is_last and bool(message.pairs))


@mutant(transfer.chunk_pages, "tail-never-sent", "T1", "T3")
def tail_held_back(right: Right, start_page: int, end: int, is_last: bool, page_size: int) -> range:
    """The last chunk ends at a page like the others: the tail page waits for ever."""
    return right(start_page, end, False, page_size)


@mutant(transfer.chunk_pages, "tail-padded-to-the-world", "T1")
def padded_to_all_ranks(right: Right, start_page: int, end: int, is_last: bool, page_size: int) -> range:
    """The last chunk is padded until it has a page for each of two ranks."""
    pages = right(start_page, end, is_last, page_size)
    return range(pages.start, pages.stop + len(pages) % 2) if is_last else pages


@mutant(transfer.closed_tokens, "open-keys-sent", "T5", "L8")
def open_keys_sent(end: int, overlap: int) -> int:
    """A page is sent once its slots are full, be its last key open: then it is bound to another page."""
    return end


@mutant(transfer.pairs, "positions-within-the-chunk", "T2", "T3")
def positions_start_at_zero(
    right: Right, pages: Sequence[int], first_position: int, rank: int, world_size: int
) -> tuple[Pair, ...]:
    """Positions are counted from the start of the chunk: the second chunk lands on the first."""
    return right(pages, 0, rank, world_size)


@mutant(Receiver.done, "one-signal-suffices", "T3")
def done_at_the_first_signal(self: Receiver) -> bool:
    """The final signal of one rank counts for all."""
    return any(message.is_last for message in self._messages.values())


@mutant(Receiver._check_positions, "positions-unchecked", "T3")
def any_positions(self: Receiver, message: Message) -> None:
    """Nobody looks whether a position has come already, or has not come at all."""


@mutant(Receiver._check_index, "index-count-unchecked", "T4")
def any_index_pages(self: Receiver, message: Message) -> None:
    """More or fewer index pages than registered are taken as they come."""


@mutant(Receiver._is_repeat, "last-message-wins", "T3")
def conflicting_repeat_ignored(self: Receiver, message: Message) -> bool:
    """Whatever comes under a number that has come is taken for a repeat, without a look at it."""
    return (message.chunk, message.rank) in self._messages


@mutant(Receiver._require_open, "late-message-accepted", "T3")
def never_over(self: Receiver, message: Message | None) -> None:
    """A request that is done or aborted goes on accepting: its pages may be another's by now."""


@mutant(Sender._require_open, "sent-twice", "T3")
def open_for_ever(self: Sender) -> None:
    """A request that was sent or aborted can be sent again."""


@mutant(Receiver._open_positions, "arrived-pages-missing", "T3")
def chunks_before_forgotten(self: Receiver, chunk: int, spans: dict[int, range]) -> tuple[int, ...]:
    """Of a chunk of which nothing has come, no page is named as missing."""
    arrived = self._arrived(chunk)
    return tuple(position for position in spans.get(chunk, range(0)) if position not in arrived)


@mutant(transfer.take_pages, "read-by-position", "T5")
def pages_read_by_position(right: Right, shard: Shard, sent: Sequence[Pair]) -> torch.Tensor:
    """The page position is taken for the local page."""
    last = shard.pages.shape[0] - 1
    return right(shard, [Pair(1 + pair.position % last, pair.position) for pair in sent])


@mutant(transfer.put_pages, "written-in-page-order", "T5")
def written_in_page_order(right: Right, decode: Shard, pages: Sequence[int], taken: torch.Tensor) -> None:
    """Pages are written to decode's pages in the order of their numbers, not in that of the message."""
    right(decode, sorted(pages), taken)
