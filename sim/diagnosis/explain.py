"""What happened, in one sentence: the ledgers of a failed run, read for the fault behind them (law V6).

A divergence says where the lists of calls part. This says how: a rank skipped a call, issued one twice,
swapped two, sent another kind, shape or type, returned early, or never comes. Pure, on what each rank has
called so far; what the calls do not tell is not guessed, and then there is no diagnosis, or two are named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from refmodel.collectives import Call
from refmodel.errors import Where
from sim.diagnosis.collectives import diagnose_collectives
from sim.diagnosis.ledger import diverged, first_divergence
from sim.diagnosis.messages import diagnose_messages
from sim.diagnosis.sentence import Diagnosis
from sim.failures import Diverged, RunFailed

Calls = Sequence[Call]


def diagnose(
    ledgers: Sequence[Calls],
    ended: Mapping[int, str],
    *,
    final: bool = False,
    waiting: Collection[int] | None = None,
) -> Diagnosis | None:
    """The fault of one rank that explains the ledgers of all, in rank order; None if none does.

    ``ended``: the ranks that make no more calls, with what they did: "returned", "died". ``final``: nobody
    moves any more, so whoever has not come to a call does not come; ``waiting`` are those of them that are
    known to wait in their last call, None if that is not known. A rank is blamed only if more than half of
    the others, it included, agree on something else.

    >>> def calls(*sites):
    ...     return [Call(n, site, "all_gather", (4, 2), "uint8", "0", 3, 8) for n, site in enumerate(sites)]
    >>> print(diagnose([calls("kv", "index"), calls("index", "kv"), calls("kv", "index")], ended={}))
    rank 1 swapped #0 kv and #1 index
    """
    found = diagnose_collectives(ledgers, ended, final=final)
    return found or diagnose_messages(ledgers, ended, final=final, waiting=waiting)


def explain(
    failure: RunFailed,
    ledgers: Sequence[Calls],
    ended: Mapping[int, str],
    *,
    final: bool = False,
    waiting: Collection[int] | None = None,
) -> None:
    """Let the failure of a run begin with the fault of the rank that brought it about, if the calls tell."""
    found = diagnose(ledgers, ended, final=final, waiting=waiting)
    if found is not None:
        failure.received = f"{found}; {failure.received}"
        failure.where = replace(failure.where, rank=found.rank, site=found.site)


def check_calls(world: str, ledgers: Sequence[Calls]) -> None:
    """Raise Diverged unless the ranks, which have returned, called the same and received what was sent.

    Where nothing waits, a divergence does not stop a run: gloo exchanges any data that have the same size.
    """
    returned = dict.fromkeys(range(len(ledgers)), "returned")
    divergence = first_divergence(ledgers)
    if divergence is not None:
        failure = diverged(world, divergence)
        explain(failure, ledgers, returned)
        raise failure
    if any(call.is_message for calls in ledgers for call in calls):
        found = diagnose(ledgers, returned)
        if found is not None:
            raise Diverged(
                f"the ranks of {world} diverge",
                expected="each message is sent once and received once",
                received=str(found),
                where=Where(rank=found.rank, site=found.site),
                fix="Receive on one rank what another sends to it.",
            )
