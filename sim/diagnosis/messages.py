"""Which message from rank to rank is missing, or one too many."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from refmodel.collectives import Call
from sim.diagnosis.channels import ANY, Channel, find_channels
from sim.diagnosis.sentence import Diagnosis, name_of

Calls = Sequence[Call]


def diagnose_messages(
    ledgers: Sequence[Calls], ended: Mapping[int, str], *, final: bool, waiting: Collection[int] | None
) -> Diagnosis | None:
    """A message that is sent and not received, or the other way round; None if all match.

    Tags that a rank receives from whoever sends are left out: they do not tell for whom it waits.
    """
    moved = [rank for rank in range(len(ledgers)) if final and rank not in ended]
    for rank in moved:
        if waiting is not None and rank not in waiting and ledgers[rank]:
            last = ledgers[rank][-1]
            return Diagnosis("hang", rank, last.site, f"rank {rank} hangs after {name_of(last)}")
    channels = find_channels(ledgers)
    from_any = {(channel.target, channel.tag) for channel in channels if channel.source == ANY}
    channels = [channel for channel in channels if (channel.target, channel.tag) not in from_any]
    receiving = {
        rank: ledgers[rank][-1] for rank in moved if ledgers[rank] and ledgers[rank][-1].kind == "recv"
    }
    over = (set(range(len(ledgers))) if final else set(ended)) - receiving.keys()
    for channel in channels:
        if len(channel.sends) > len(channel.receives) and channel.target in over:
            return _unreceived(channel)
    for channel in channels:
        # What one sends who waits himself is late for that reason alone.
        if len(channel.receives) > len(channel.sends) and channel.source in over:
            return _unsent(channel)
    for channel in channels:
        all_sent = len(channel.sends) >= len(channel.receives) > 0
        if all_sent and receiving.get(channel.target) is channel.receives[-1]:
            return _lost(channel, is_certain=waiting is not None)
    return None


def _unreceived(channel: Channel) -> Diagnosis:
    repeated = [
        one
        for one, other in pairwise(channel.sends)
        if (one.site, one.key, one.sequence + 1) == (other.site, other.key, other.sequence)
    ]
    # A program that sends one like the other anyway does not tell which of them was one too many.
    if len(repeated) == 1:
        one = repeated[0]
        count = f"{len(channel.sends)} messages for {len(channel.receives)} receives"
        deed = f"sent {name_of(one)} to rank {channel.target} twice: {count}"
        return Diagnosis("repeat", channel.source, one.site, f"rank {channel.source} {deed}")
    extra = channel.sends[len(channel.receives)]
    deed = f"sent {name_of(extra)} to rank {channel.target}, which does not receive it"
    return Diagnosis("unreceived", channel.source, extra.site, f"rank {channel.source} {deed}")


def _unsent(channel: Channel) -> Diagnosis:
    awaited = channel.receives[len(channel.sends)]
    deed = f"did not send what rank {channel.target} waits for in {name_of(awaited)}"
    return Diagnosis("skip", channel.source, awaited.site, f"rank {channel.source} {deed}")


def _lost(channel: Channel, *, is_certain: bool) -> Diagnosis:
    awaited, sent = channel.receives[-1], channel.sends[len(channel.receives) - 1]
    waits = f"which still waits for it in {name_of(awaited)}"
    otherwise = "" if is_certain else f", or rank {channel.target} hangs after it"
    deed = f"sent {name_of(sent)} to rank {channel.target}, {waits}: it is lost{otherwise}"
    return Diagnosis("lose", channel.source, sent.site, f"rank {channel.source} {deed}")
