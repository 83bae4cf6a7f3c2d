"""A history without ranks and bytes: what each step must come to, by a simple model.

The engine runs beside a model that knows little: which tokens each page of the tree and each host copy stands
for, and the fate of every message to decode. Hits, refusals, free pages, ends of chunks, what is backed up
and what decode waits for follow from it by counting; none is asked of the rooms that are judged. What the
model says is written into the step, so that the ranks are held to it as well.
"""

from properties.rehearsal.marks import MARKS
from properties.rehearsal.rehearsal import Rehearsal

__all__ = ["MARKS", "Rehearsal"]
