"""What a check found, as plain values: the JSON report, and what the table and the tests are made from.

The keys of the JSON report are the field names below. They stay; a change of meaning raises ``schema``.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

import msgspec

from properties.kernels import faults
from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from properties.kernels.paste import code_of
from properties.kernels.tried import Counterexample
from refmodel.errors import InvalidInput

SCHEMA = 1

Word = Literal["pass", "fail", "known", "unknown"]


class Failure(msgspec.Struct, frozen=True):
    """How a kernel failed, on the smallest case that is known."""

    kind: str  # a law, "V1", or a word of properties.kernels.faults, "crash"
    statement: str  # what it says must hold
    what: str
    expected: str
    received: str
    rank: int | None  # of a collective
    handling: str  # how tensors were handed over; empty for the plainest way
    steady: bool  # it fails whenever it is tried
    case: dict[str, Any]
    code: str  # Python that makes this call
    replay: str  # the command that tries this case again


class Timing(msgspec.Struct, frozen=True):
    """How fast it was, on one case."""

    case: str
    device: str
    seconds: float
    reference_seconds: float
    bytes_per_second: float
    flops_per_second: float
    share_of_copy: float  # of the speed of a plain copy here


class Verdict(msgspec.Struct, frozen=True):
    """One operation of a target."""

    op: str
    verdict: Word  # known: it fails as the list of known failures says
    why: str  # of unknown: what is missing; of known: the reason; of pass: what was not tried
    declared: dict[str, str]  # capabilities that differ from the default
    cases: int
    attempts: int  # cases, in some ways each
    seconds: float
    failure: Failure | None = None
    timing: Timing | None = None


class Report(msgspec.Struct, frozen=True):
    """A whole check."""

    schema: int
    version: str  # of cpkv
    target: str
    device: str
    seed: int
    examples: int
    seconds: float
    exit_code: int
    verdicts: list[Verdict]
    lacking: list[str]  # operations of the catalogue that the target does not have
    near_misses: dict[str, str]  # functions that are no operation, by the name that they are like

    @property
    def held(self) -> bool:
        return self.exit_code == 0


def report_of(
    verdicts: list[Verdict],
    *,
    target: str,
    device: str,
    seed: int,
    examples: int,
    seconds: float,
    lacking: list[str],
    near_misses: dict[str, str],
    named: bool,
) -> Report:
    """The record of a whole check. ``named``: these operations were asked for, so none may stay unknown."""
    return Report(
        schema=SCHEMA,
        version=version("cpkv-testbed"),
        target=target,
        device=device,
        seed=seed,
        examples=examples,
        seconds=round(seconds, 3),
        exit_code=_exit_code([verdict.verdict for verdict in verdicts], named),
        verdicts=verdicts,
        lacking=lacking,
        near_misses=near_misses,
    )


def _exit_code(words: list[Word], named: bool) -> int:
    if "fail" in words:
        return 1
    said_nothing = words.count("unknown") == len(words) or (named and "unknown" in words)
    return 2 if said_nothing else 0


def failure_of(found: Counterexample, target: str, options: str) -> Failure:
    """The record of a counterexample. ``options`` of the command besides target, operation and case."""
    finding = found.finding
    op = found.case.op.name
    case = msgspec.json.encode(found.case).decode()
    replay = f"cpkv check {shlex.quote(target)} --op {op} --case {shlex.quote(case)}"
    return Failure(
        kind=finding.law,
        statement=faults.statement(finding.law),
        what=finding.what,
        expected=finding.expected,
        received=finding.received,
        rank=finding.where.rank,
        handling=str(found.handling),
        steady=found.steady,
        case=msgspec.to_builtins(found.case),
        code=code_of(found.case, found.handling, target),
        replay=f"{replay} {options}".rstrip(),
    )


def parse_case(op: str, text: str) -> Case:
    """A case from its JSON. :class:`InvalidInput` if it is none of this operation."""
    kind = CASES[op]
    fields = list(kind.__dataclass_fields__)
    try:
        given = msgspec.json.decode(text)
        if not isinstance(given, dict) or not set(given) <= set(fields):
            raise InvalidInput("--case", expected=f"of {op}: {', '.join(fields)}", received=text)
        case = msgspec.convert(given, type=kind)
        replace(case).arguments()
    except msgspec.MsgspecError as error:
        raise InvalidInput("--case", expected=f"of {op}: {', '.join(fields)}", received=str(error)) from error
    return case
