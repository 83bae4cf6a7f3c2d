"""How far a low-precision result may be from the exact one: derived, never typed in (law A5).

Two runs set the budget: the exact one, in float64, and a *twin*, the same arithmetic in low precision on one
rank. What the twin loses is what the precision costs; a right sharded run differs from the twin by the order
of sums and by where partial results are rounded. Twice the twin's error covers that, and two units in the
last place of the largest element cover inputs on which the twin happens to be exact. It is the rule of
attention-gym's tests. Errors are largest differences, relative to the largest exact element
(:func:`refmodel.oracle.relative_error`): NaN exceeds every budget.

>>> budget(0.001, eps=2**-8)
0.0098125
"""

from __future__ import annotations

FP64_BUDGET = 1e-10  # of float64 against the oracle (A5); it needs no twin


def budget(twin_error: float, *, eps: float) -> float:
    """The largest error of a right result. ``eps``: machine epsilon of its element type.

    Of relative errors; for absolute ones ``eps`` is that of the largest exact element.
    """
    return 2 * (twin_error + eps)
