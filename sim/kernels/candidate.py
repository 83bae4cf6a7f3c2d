"""A kernel of somebody's, as an operation of the catalogue: how it is called, and what it can do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from refmodel.errors import InvalidInput
from refmodel.ops.declare import Capabilities
from refmodel.ops.op import Arguments, Op, Results

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class NotResults(TypeError):
    """What a kernel returned is not what its operation has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A function that says it is ``op``.

    :class:`InvalidInput` unless its parameters are the operation's, by name and in order. More are fine if
    they have defaults. ``out`` is for the results: one tensor, or a tuple of as many as there are.
    """

    op: Op
    function: Callable[..., Any]
    capabilities: Capabilities = field(default_factory=Capabilities)

    def __post_init__(self) -> None:
        _check_signature(self.op, self.function)

    @property
    def takes_out(self) -> bool:
        """Whether results can be written to tensors that the caller gives."""
        return bool(self.op.results) and _out(self.function) is not None

    @property
    def needs_out(self) -> bool:
        """Whether they must be given."""
        out = _out(self.function) if self.op.results else None
        return out is not None and out.default is inspect.Parameter.empty

    def run(self, arguments: Arguments, out: Results | None = None) -> Results:
        """Call it. What it returns, as a tuple; or ``out``, if that is given.

        :class:`NotResults` if what comes back are no tensors, or not as many as the operation has.
        """
        values = [arguments[argument.name] for argument in self.op.arguments]
        if out is not None:
            self.function(*values, out=out[0] if len(out) == 1 else out)
            return out
        return self._results(self.function(*values))

    def _results(self, returned: object) -> Results:
        count = len(self.op.results)
        if not count:  # it writes into its arguments; what else it returns is nobody's business
            return ()
        results = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        if len(results) != count or not all(isinstance(result, torch.Tensor) for result in results):
            kinds = ", ".join(type(result).__name__ for result in results)
            plural = "" if count == 1 else "s"
            raise NotResults(f"{self.op.name} has {count} result{plural}, tensors; got ({kinds})")
        return results


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Of the function; None if nobody can know."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built in, without a signature
        return None


def _out(function: Callable[..., Any]) -> inspect.Parameter | None:
    return next((one for one in _parameters(function) or () if one.name == "out"), None)


def _check_signature(op: Op, function: Callable[..., Any]) -> None:
    parameters = _parameters(function)
    if parameters is None or any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        return
    wanted = [argument.name for argument in op.arguments]
    given = [one.name for one in parameters if one.kind in _NAMED]
    needed = [
        one
        for one in parameters
        if one.name not in (*wanted, "out")
        and one.default is inspect.Parameter.empty
        and one.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if given[: len(wanted)] != wanted or needed:
        name = getattr(function, "__name__", type(function).__name__)
        raise InvalidInput(
            f"signature of {name}",
            expected=op.signature,
            received=f"{name}{inspect.signature(function)}",
            fix="Arguments come by these names and in this order; more need defaults; "
            "`out` is where results go.",
        )
