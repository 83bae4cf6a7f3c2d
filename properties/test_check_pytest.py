"""The kit under pytest: a test an operation, and none without a target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from properties.command_line import PLAIN as PLAIN_TERMINAL
from properties.kernel_files import RIGHT, Write
from refmodel.ops.catalogue import OPS


def _pytest(folder: Path, *options: object) -> str:
    """In a process of its own, from a folder that knows nothing of this repository."""
    env = {name: value for name, value in os.environ.items() if name not in PLAIN_TERMINAL}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "properties.kernels",
        "-p",
        "no:cacheprovider",
        "-rA",
    ]
    done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, env=env, cwd=folder)
    return done.stdout + done.stderr


def test_pytest_has_a_test_an_operation(kernels: Write, tmp_path: Path) -> None:
    file = kernels(
        RIGHT + "\ndef rerange(buffers, prefixes, tokens, world_size, page_size): return buffers[:0]\n"
    )
    output = _pytest(tmp_path, "--cpkv-kernels", file, "--cpkv-examples", 5)
    assert re.search(r"PASSED .*\[logical_to_physical\]", output)
    assert re.search(r"FAILED .*\[rerange\]", output)
    assert "shape: Results have the shapes" in output
    assert "replay        cpkv check" in output
    assert f"1 failed, 1 passed, {len(OPS) - 2} skipped" in output


def test_pytest_without_a_target_tests_nothing_and_refuses_a_bad_one(tmp_path: Path) -> None:
    assert "1 skipped" in _pytest(tmp_path)
    output = _pytest(tmp_path, "--cpkv-kernels", "no_such_module")
    assert "No module named 'no_such_module'" in output
    assert "passed" not in output
