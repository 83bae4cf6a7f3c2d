"""Kinds of failure that no judge is needed for, and what a right kernel does instead."""

from __future__ import annotations

from types import MappingProxyType

from refmodel.laws import LAWS

RAISES = "raises"
RESULTS = "results"
SHAPE = "shape"
DTYPE = "dtype"
DEVICE = "device"
CHANGED = "changed input"
OUTSIDE = "outside"
SHARED = "shared memory"
OVERWRITTEN = "overwritten"
REPEAT = "repeat"
CRASH = "crash"
HANG = "hang"
UNEXPECTED_PASS = "unexpected pass"

STATEMENTS = MappingProxyType(
    {
        RAISES: "Arguments that the contract allows are not refused.",
        RESULTS: "There are as many results as the operation has, and all are tensors.",
        SHAPE: "Results have the shapes that follow from the arguments.",
        DTYPE: "Results have the dtypes that follow from the arguments.",
        DEVICE: "Results are on the device of the arguments.",
        CHANGED: "What is not to be written stays as it is, bit for bit.",
        OUTSIDE: "Nothing is written outside of the tensors: not before, behind or between their elements.",
        SHARED: "A result shares no memory with an argument.",
        OVERWRITTEN: "A result stays as it is when the kernel is called again.",
        REPEAT: "Declared deterministic: the same arguments give the same bits.",
        CRASH: "The process survives.",
        HANG: "An answer comes within the time limit.",
        UNEXPECTED_PASS: "What is listed as a known failure fails.",
    }
)


def statement(kind: str) -> str:
    """What a law, or a kind of failure, says must hold."""
    return LAWS[kind].statement if kind in LAWS else STATEMENTS[kind]
