"""Kernels put to the check, in this process or in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from properties.kernels import faults
from properties.kernels.adversaries import cheats
from properties.kernels.adversaries.adversary import Adversary, adversaries_of
from properties.kernels.cases.catalogue import CASES
from properties.kernels.check import Check, Plan
from properties.kernels.trial import Trial
from properties.kernels.tried import Search, Tried
from properties.kernels.verdicts import Verdict
from properties.kernels.watched import Children
from refmodel.ops.catalogue import OPS
from refmodel.ops.declare import Capabilities, declaration_of
from sim.kernels.candidate import Candidate

CHEATS = tuple(adversaries_of(cheats))
DEADLY = {faults.CRASH, faults.HANG}
ALONE = [op for op in OPS if not OPS[op].collective]


def named(adversary: Adversary) -> str:
    return adversary.name


def candidate_of(function: Callable[..., Any], op: str) -> Candidate:
    said = declaration_of(function)
    return Candidate(OPS[op], function, said.capabilities if said else Capabilities())


def tried(candidate: Candidate, examples: int = 30) -> Tried:
    """In this process: quick, as long as the candidate lets it live."""
    search = Search(candidate, CASES[candidate.op.name], Trial(candidate).once, examples, seed=0)
    return search.run()


def verdict_of(target: str, op: str, **plan: Any) -> Verdict:
    """In a process of its own, as the command does it."""
    with Children(target, op, plan.get("limit", 60.0)) as children:
        return Check(Plan(target, (op,), **plan), children).verdict(op)
