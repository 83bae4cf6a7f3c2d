"""Fingerprints of tables are equal wherever they are taken, or ranks that are processes could not compare."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """\
import sys
from sim.cases.library import find_scenarios
from sim.engine.play import play
from sim.gate.verdict import fallbacks_unwarned
from sim.world import World

(history,) = find_scenarios(sys.argv[1])
with fallbacks_unwarned(), World.lockstep(history.world_size) as world:
    print([played.fingerprints for played in world.run(play, history)])
"""


@pytest.mark.parametrize(
    "name", ["radix/prompts-of-blocks", "hostcache/two-hit-one-load", "transfer/shared-prefix"]
)
def test_a_history_has_the_same_fingerprints_in_every_process(name: str) -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, name],
            env=os.environ | {"PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    ]
    assert said[0] == said[1] != ""
