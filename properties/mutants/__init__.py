"""Named wrong versions of the reference: proof that each law has a property that can fail.

A mutant replaces one function. :data:`MUTANTS` holds all of them; :mod:`properties.mutants.matrix` runs the
properties and scenarios against each and says what caught it.
"""

from difflib import get_close_matches

from properties.mutants import (
    admission,
    attention,
    collectives,
    decode,
    draft,
    formats,
    host,
    lanes,
    model,
    ownership,
    plan,
    radix,
    reuse,
    split,
    transfer,
    view,
)
from properties.mutants.mutant import Mutant
from refmodel.errors import InvalidInput

_MODULES = (
    *(split, plan, ownership, view, reuse, collectives, formats, attention, model, draft),
    *(lanes, radix, host, transfer, decode, admission),
)

MUTANTS: tuple[Mutant, ...] = tuple(
    found for module in _MODULES for found in vars(module).values() if isinstance(found, Mutant)
)


def named_mutant(name: str) -> Mutant:
    """The mutant of that id; :class:`InvalidInput` if there is none."""
    found = next((mutant for mutant in MUTANTS if mutant.id == name), None)
    if found is None:
        near = get_close_matches(name, [mutant.id for mutant in MUTANTS], n=3, cutoff=0.3)
        raise InvalidInput(
            "mutant",
            expected=f"one of {', '.join(near)}" if near else "an id",
            received=name,
            fix="`cpkv mutants` lists them.",
        )
    return found
