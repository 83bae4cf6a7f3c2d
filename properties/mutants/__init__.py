"""Named wrong versions of the reference: proof that each law has a property that can fail.

A mutant replaces one function. :data:`MUTANTS` holds all of them; :mod:`properties.mutants.matrix` runs the
properties and scenarios against each and says what caught it.
"""

from properties.mutants import attention, collectives, ownership, plan, split, view
from properties.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = tuple(
    found
    for module in (split, plan, ownership, view, collectives, attention)
    for found in vars(module).values()
    if isinstance(found, Mutant)
)
