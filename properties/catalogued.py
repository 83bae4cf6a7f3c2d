"""Scenarios of the catalogue by kind and by name, read once."""

from __future__ import annotations

from sim.cases.library import catalogue
from sim.cases.scenario import Scenario
from sim.histories.history import History

CATALOGUE = tuple(catalogue())
OF_FORWARDS = tuple(scenario for scenario in CATALOGUE if isinstance(scenario, Scenario))
HISTORIES = tuple(scenario for scenario in CATALOGUE if isinstance(scenario, History))
ON_GLOO = tuple(scenario for scenario in CATALOGUE if "gloo" in scenario.worlds)

_BY_NAME = {history.file.removesuffix(".yaml"): history for history in HISTORIES}


def history_named(name: str) -> History:
    """E.g. ``radix/pairs-by-pages``."""
    return _BY_NAME[name]
