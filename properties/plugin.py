"""What pytest needs to run these properties: profiles, an option, markers, worlds, a check of where it went.

In this repository ``conftest.py`` loads it. Elsewhere: ``pytest --pyargs properties -p properties.plugin``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from properties import reached
from sim.garbage import collect_seldom
from sim.gate.marks import MARKS
from sim.world import World

# Of the kernel kit: options (this same plugin, where they came by its entry point), and files of kernels.
pytest_plugins = ["properties.kernels.options", "properties.kernel_files"]

# Tests run on all cores already (xdist); threads of torch on top only get in each other's way.
torch.set_num_threads(1)

# Hypothesis would load its own profile where CI is set: the same 100 examples for ever, nothing saved.
settings.register_profile("dev", deadline=None, max_examples=40)
settings.register_profile(
    "ci", deadline=None, max_examples=150, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--world",
        action="append",
        choices=["lockstep", "gloo", "nccl"],
        help="run only tests of these kinds of world (default: all that this machine has)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in (
        ("gloo", "runs on gloo processes"),
        ("nccl", "runs on NVIDIA GPUs"),
        ("slow", "takes more than a few seconds"),
    ):
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    collect_seldom()
    wanted = config.getoption("--world", None)  # missing where a conftest loaded this late
    for item in items:
        kind = next((name for name in ("gloo", "nccl") if item.get_closest_marker(name)), "lockstep")
        if wanted and kind not in wanted:
            item.add_marker(pytest.mark.skip(reason=f"--world asks for {', '.join(wanted)} only"))


@pytest.fixture(scope="session")
def gloo_world() -> Iterator[Callable[[int], World]]:
    """``gloo_world(size)``: a pool of processes, started once a pytest worker and size."""
    pools: dict[int, World] = {}

    def pool(size: int) -> World:
        if size not in pools:
            pools[size] = World.gloo(size)
        return pools[size]

    yield pool
    for world in pools.values():
        world.close()


@pytest.fixture
def scenario(tmp_path: Path) -> Callable[[str], Path]:
    """``scenario(text)``: a scenario file with that text."""

    def write(text: str) -> Path:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        return file

    return write


# -- reachability: a whole run that never had an empty rank, say, proves little, and fails -----------------


# Marks that the workers of xdist have reached, at their controller.
_MARKS = pytest.StashKey[set[str]]()


class _Controller:
    """Hears what each worker of xdist has reached; without xdist nobody calls it."""

    def __init__(self, config: pytest.Config) -> None:
        self.marks = config.stash.setdefault(_MARKS, set())

    @pytest.hookimpl(optionalhook=True)  # it is xdist's, which may be switched off
    def pytest_testnodedown(self, node: object) -> None:
        self.marks |= set(getattr(node, "workeroutput", {}).get("marks", ()))


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(_Controller(session.config), "cpkv-reached")


def _is_whole_run(config: pytest.Config) -> bool:
    chosen = config.getoption("keyword") or config.getoption("markexpr") or config.getoption("--world")
    return config.args_source is not pytest.Config.ArgsSource.ARGS and not chosen


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of xdist: hand over to the controller
        session.config.workeroutput["marks"] = sorted(reached.marks)
        return
    elsewhere = session.config.stash.get(_MARKS, None)
    if elsewhere is None:  # a conftest loaded this in the midst of a session that is not ours
        return
    missing = set(MARKS) - reached.marks - elsewhere
    if exitstatus == pytest.ExitCode.OK and _is_whole_run(session.config) and missing:
        print(f"\nno test reached: {', '.join(sorted(missing))}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
