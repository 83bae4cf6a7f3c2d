"""Messages from rank to rank: which sends belong to which receives, from what the ranks have called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refmodel.collectives import Call

ANY = -1  # receives from whoever sends


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages with one tag from one rank to another; they arrive in the order in which they are sent."""

    group: str
    source: int  # ranks of the world; ANY where a receive takes what comes
    target: int
    tag: int
    sends: list[Call] = field(default_factory=list)
    receives: list[Call] = field(default_factory=list)


def find_channels(ledgers: Sequence[Sequence[Call]]) -> list[Channel]:
    """All channels that the ranks, in rank order, send or receive on; of groups all members of which call.

    >>> def message(kind, detail, sequence=0):
    ...     return Call(sequence, "ring", kind, (4,), "uint8", "0", 2, 4, detail, is_message=True)
    >>> (ring,) = find_channels([[message("send", "to 1 tag 7")], [message("recv", "from 0 tag 7")]])
    >>> ring.source, ring.target, ring.tag, len(ring.sends), len(ring.receives)
    (0, 1, 7, 1, 1)
    """
    channels: dict[tuple[str, int, int, int], Channel] = {}
    members = _members(ledgers)
    for rank, calls in enumerate(ledgers):
        for call in calls:
            if not call.is_message or len(members[call.group]) < call.group_size:
                continue
            peer, tag = _peer_and_tag(call)
            other = ANY if peer == ANY else members[call.group][peer]
            ends = (rank, other) if call.kind == "send" else (other, rank)
            channel = channels.setdefault((call.group, *ends, tag), Channel(call.group, *ends, tag))
            (channel.sends if call.kind == "send" else channel.receives).append(call)
    return list(channels.values())


def _members(ledgers: Sequence[Sequence[Call]]) -> dict[str, list[int]]:
    """The ranks of each group, in the order of the group: all ranks, or those that call on it."""
    members: dict[str, list[int]] = {}
    for rank, calls in enumerate(ledgers):
        for group, size in {call.group: call.group_size for call in calls}.items():
            if size == len(ledgers):
                members[group] = list(range(size))
            elif rank not in members.setdefault(group, []):
                members[group].append(rank)
    return members


def _peer_and_tag(call: Call) -> tuple[int, int]:
    """Of a detail such as "to 1", "from any", "to 1 tag 7"."""
    words = call.detail.split()
    return ANY if words[1] == "any" else int(words[1]), int(words[3]) if len(words) > 3 else 0
