"""A machine whose examples are histories: operations drawn one by one, each from what is there.

A rehearsal beside it (:mod:`properties.rehearsal`) runs without ranks, and says beforehand what each step
must come to. Then all ranks play the whole history. Each example has few features and some operations
switched off (swarm testing), so that histories without a single finish come up too, in which lanes fill up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis import target

from properties.drawing.choices import Choices
from properties.drawing.host_operations import HOST_OPERATIONS, STORAGE_OPERATIONS
from properties.drawing.operation import Operation
from properties.drawing.request_operations import REQUEST_OPERATIONS
from properties.drawing.service import drawn_service, unfit_services
from properties.drawing.transfer_operations import TRANSFER_OPERATIONS
from properties.rehearsal import Rehearsal
from refmodel.errors import Finding
from sim.gate.histories import try_history
from sim.histories.history import History, Step
from sim.world import World

_UNFIT_ONCE_IN = 20
FEWEST_STEPS, MOST_STEPS = 12, 13  # drawn; an operation of several steps may go beyond
_OPERATIONS_OF = {"host": HOST_OPERATIONS, "storage": STORAGE_OPERATIONS, "transfer": TRANSFER_OPERATIONS}
_NEVER_OFF = ("forward", "submit fresh")


class Broken(AssertionError):
    """A history that does not hold."""

    def __init__(self, history: History, findings: tuple[Finding, ...], seed: int) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.history, self.findings, self.seed = history, findings, seed


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A history that was drawn, and rehearsed on the way; or in its place a server that must not start."""

    rehearsal: Rehearsal
    seed: int  # of the schedule
    luck: int  # whatever else is to be chosen for it

    @property
    def unfit(self) -> History | None:
        """The server that must not start, if it is one."""
        luck, kind = divmod(self.luck, _UNFIT_ONCE_IN)
        setting = self.rehearsal.setting
        services = unfit_services(setting.world_size, setting.page_size)
        return services[luck % len(services)] if kind == _UNFIT_ONCE_IN - 1 else None

    @property
    def history(self) -> History:
        return self.unfit or self.rehearsal.history

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the rehearsal found."""
        return () if self.unfit else tuple(self.rehearsal.findings)


@st.composite
def histories(draw: st.DrawFn, *, aimed: bool = False, ranks: int | None = None) -> Drawn:
    """Histories of a dozen steps or a few more, up to the first that does not hold.

    ``aimed``: so that :func:`aim` has an effect; else they are as different as chance makes them.
    ``ranks``: of every service, if that is not to be drawn.
    """
    return drawn_history(Choices.aimed(draw) if aimed else Choices.free(draw), ranks)


def drawn_history(choices: Choices, ranks: int | None = None) -> Drawn:
    """One history, by whatever makes the choices."""
    service, features = drawn_service(choices, ranks)
    operations = _operations(features)
    may_be_off = [name for name in operations if name not in _NEVER_OFF]
    off = {choices.of(may_be_off) for _ in range(choices.below(3))}
    length, seed, luck = choices.between(FEWEST_STEPS, MOST_STEPS), choices.below(2**16), choices.below(2**16)
    rehearsal = Rehearsal(service)
    while len(rehearsal.steps) < length and not rehearsal.findings:
        for step in _next_steps(choices, rehearsal, operations, off):
            rehearsal.step(step)
            if rehearsal.findings:
                break
    return Drawn(rehearsal, seed, luck)


def _operations(features: Collection[str]) -> dict[str, Operation]:
    """What can be drawn for a service."""
    operations = dict(REQUEST_OPERATIONS)
    for feature, more in _OPERATIONS_OF.items():
        if feature in features:
            operations |= more
    return operations


def _next_steps(
    choices: Choices, rehearsal: Rehearsal, operations: dict[str, Operation], off: Collection[str]
) -> Iterable[Step]:
    """One operation, of those that are possible now and not switched off."""
    model, crowded = rehearsal.model, rehearsal.crowded
    weights = {
        name: each.when_crowded if crowded else each.weight
        for name, each in operations.items()
        if name not in off and each.possible(model)
    }
    name = choices.weighted(weights or {"nonsense": 1})
    return operations[name].steps(choices, model)


def aim(rehearsal: Rehearsal) -> None:
    """What Hypothesis is to find more of."""
    model = rehearsal.model
    lanes = model.tables.lanes
    used = [lanes.held(lane) + lanes.cached(lane) for lane in range(model.W)]
    tails = [request.valid % model.P for request in model.seen.values()]
    for label, value in (
        ("lanes uneven by", max(used) - min(used)),
        ("evictions", rehearsal.evictions),
        ("victims of one age", rehearsal.of_one_age),
        ("tokens in tails", sum(tails)),
        ("pages loaded elsewhere", rehearsal.moved),
        ("pages out of order", rehearsal.out_of_order),
    ):
        target(float(value), label=label)


def judge(drawn: Drawn) -> None:
    """Play a history on simulated ranks. :class:`Broken` if it does not hold."""
    with World.lockstep(drawn.rehearsal.setting.world_size, seed=drawn.seed) as world:
        findings = try_history(world, drawn.history).findings or drawn.findings
    if findings:
        raise Broken(drawn.history, findings, drawn.seed)
