"""A target: where kernels are, said on the command line, and which operations they are.

``kernels.py``, ``kernels.py:function``, ``package.module``, ``package.module:function``, or the name of an
entry point of the group ``cpkv.kernels``. Functions are operations by their names, or by
:func:`refmodel.ops.declare.kernel`; a mapping ``CAPABILITIES = {op: {…}}`` of their module says more.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from refmodel.errors import InvalidInput
from refmodel.ops.catalogue import OPS
from refmodel.ops.declare import Capabilities, capabilities_of, declaration_of
from refmodel.ops.op import Op
from sim.kernels.candidate import Candidate

GROUP = "cpkv.kernels"
_SIMILAR = 0.75  # of names, from 0 to 1


@dataclass(frozen=True, slots=True)
class Target:
    """Kernels that belong together, by the operation that each is."""

    name: str  # as it was given
    candidates: Mapping[str, Candidate]
    near_misses: tuple[tuple[str, str], ...] = ()  # (function, operation whose name is like its own)


def load_target(text: str, op: str | None = None) -> Target:
    """Import what ``text`` names. ``op`` says which operation ``file.py:function`` is.

    This runs the code there. :class:`InvalidInput` if it does not import (with its traceback), has no
    operation, or has one with another signature.
    """
    place, function_name = _divided(text)
    found = _object(text, place)
    if function_name:
        found = _member(text, found, function_name)
    if isinstance(found, ModuleType):
        return _of_module(text, found)
    if not callable(found):
        raise InvalidInput(text, expected="a module or a function", received=type(found).__name__)
    name = function_name or getattr(found, "__name__", "")
    return Target(text, dict([_of_function(text, found, name, op)]))


def known_op(name: str, *, what: str = "operation") -> Op:
    """The operation of that name. :class:`InvalidInput` with the names that are like it, if there is none."""
    if name in OPS:
        return OPS[name]
    near = get_close_matches(name, OPS, cutoff=0.5)
    raise InvalidInput(
        what,
        expected=f"one of {', '.join(sorted(OPS))}",
        received=name,
        fix=f"Did you mean {' or '.join(near)}?" if near else "",
    )


def _divided(text: str) -> tuple[str, str]:
    place, _, function = text.rpartition(":") if ":" in text else (text, "", "")
    if not place or (":" in text and not function):
        raise InvalidInput("target", expected="file.py, module, or one of them with :function", received=text)
    return place, function


# -- finding it --------------------------------------------------------------------------------------------


def _object(text: str, place: str) -> object:
    if place.endswith(".py") or "/" in place:
        return _module_of_file(text, Path(place))
    entries = [entry for entry in entry_points(group=GROUP) if entry.name == place]
    load: Callable[[], object] = entries[0].load if entries else lambda: _module(place)
    return _imported(text, load)


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` finds it, but behind what is installed
        sys.path.append(here)
    return import_module(name)


def _module_of_file(text: str, file: Path) -> object:
    if not file.is_file():
        raise InvalidInput("target", expected="a file, a module or an entry point", received=text)
    path = file.resolve()
    folder = str(path.parent)
    if folder not in sys.path:  # for what it imports from beside it
        sys.path.append(folder)
    # A name of its own: `test.py` must not take the place of another module of that name.
    name = f"cpkv_target_{path.stem}_{sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidInput("target", expected="a file of Python", received=text)
    module = importlib.util.module_from_spec(spec)
    execute = spec.loader.exec_module

    def load() -> object:
        sys.modules[name] = module  # dataclasses, pickle and Triton look themselves up there
        execute(module)
        return module

    return _imported(text, load)


def _imported(text: str, load: Callable[[], object]) -> object:
    try:
        return load()
    except Exception as error:
        own = {__name__, "importlib", "importlib._bootstrap", "importlib._bootstrap_external"}
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals.get("__name__") in own | {
            "importlib.metadata"
        }:
            frames = frames.tb_next
        said = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        raise InvalidInput(
            f"target {text}", expected="a module that can be imported", received=f"\n{said}"
        ) from error


def _member(text: str, module: object, name: str) -> object:
    value = getattr(module, name, None)
    if value is None:
        names = [known for known, _ in _functions(module)]
        near = get_close_matches(name, names)
        raise InvalidInput(
            f"target {text}",
            expected=f"a function of {', '.join(names) or 'a module that has some'}",
            received=name,
            fix=f"Did you mean {' or '.join(near)}?" if near else "",
        )
    return value


# -- which operations it has -------------------------------------------------------------------------------


def _functions(module: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public callables that are no classes, by name."""
    for name, value in vars(module).items():
        if not name.startswith("_") and callable(value) and not isinstance(value, type):
            yield name, value


def _of_module(text: str, module: ModuleType) -> Target:
    capabilities = _declared_by(text, module)
    candidates: dict[str, Candidate] = {}
    others = []
    for name, function in _functions(module):
        said = declaration_of(function)
        op = said.op if said else name
        if said is None and name not in OPS:
            others.append(name)
            continue
        if op in candidates and candidates[op].function is not function:
            raise InvalidInput(
                f"target {text}", expected=f"one function that is {op}", received=f"two, {name} among them"
            )
        candidates[op] = Candidate(
            known_op(op, what=f"{name} of {text}"), function, _all(op, said, capabilities)
        )
    near = tuple(_near_misses(others, candidates))
    if not candidates:
        raise InvalidInput(
            f"target {text}",
            expected=f"a function named as an operation: {', '.join(sorted(OPS))}",
            received=", ".join(others) or "no functions",
            fix=" ".join(f"Is {name} meant to be {op}?" for name, op in near),
        )
    for op in capabilities:
        if op not in candidates:
            raise InvalidInput(f"CAPABILITIES of {text}", expected=f"of {', '.join(candidates)}", received=op)
    return Target(text, candidates, near)


def _near_misses(names: Sequence[str], candidates: Mapping[str, Candidate]) -> Iterator[tuple[str, str]]:
    missing = [op for op in OPS if op not in candidates]
    for name in names:
        for op in get_close_matches(name, missing, n=1, cutoff=_SIMILAR):
            yield name, op


def _of_function(text: str, function: Any, name: str, op: str | None) -> tuple[str, Candidate]:
    said = declaration_of(function)
    chosen = known_op(op or (said.op if said else name), what=f"operation of {text}")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    capabilities = _declared_by(text, module) if module else {}
    return chosen.name, Candidate(chosen, function, _all(chosen.name, said, capabilities))


def _declared_by(text: str, module: ModuleType) -> Mapping[str, Mapping[str, Any]]:
    """``CAPABILITIES`` of the module."""
    given = getattr(module, "CAPABILITIES", {})
    if not isinstance(given, Mapping) or not all(isinstance(value, Mapping) for value in given.values()):
        raise InvalidInput(
            f"CAPABILITIES of {text}", expected="a mapping {op: {name: value}}", received=repr(given)
        )
    for op in given:
        known_op(op, what=f"CAPABILITIES of {text}")
    return given


def _all(op: str, said: Any, by_module: Mapping[str, Mapping[str, Any]]) -> Capabilities:
    beside = said.capabilities if said else None
    return capabilities_of(by_module.get(op, {}), what=f"CAPABILITIES[{op!r}]", beside=beside)
