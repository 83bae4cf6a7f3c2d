"""Fingerprints of tables are equal wherever they are taken, or ranks that are processes could not compare."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OF_A_TREE = """\
from refmodel.serving.radix import HitMode, RadixTree

tree = RadixTree(2, HitMode.TOKEN)
tree.insert([1, 2, 3, 4, 5], [5, 6, 7], 1, finished=True)
tree.insert([1, 2, 4], [5, 8], 2, finished=True)
print(tree.fingerprint())
"""

OF_A_HISTORY = """\
import sys
from sim.cases.library import find_scenarios
from sim.engine.play import play
from sim.gate.verdict import fallbacks_unwarned
from sim.world import World

(history,) = find_scenarios(sys.argv[1])
with fallbacks_unwarned(), World.lockstep(history.world_size) as world:
    print([played.fingerprints for played in world.run(play, history)])
"""


def said_by(program: str, *args: str) -> set[str]:
    """What processes print that hash strings in other ways."""
    return {
        subprocess.run(
            [sys.executable, "-c", program, *args],
            env=os.environ | {"PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }


def test_a_tree_has_the_same_fingerprint_in_every_process() -> None:
    (said,) = said_by(OF_A_TREE)
    assert said


@pytest.mark.parametrize(
    "name", ["radix/prompts-of-blocks", "hostcache/two-hit-one-load", "transfer/shared-prefix"]
)
def test_a_history_has_the_same_fingerprints_in_every_process(name: str) -> None:
    (said,) = said_by(OF_A_HISTORY, name)
    assert said
