"""Scenario files: YAML, strictly typed; and the catalogue of those that ship with cpkv.

A file with the key ``history`` is a history: operations over time instead of forwards. Errors name the file,
the path in it, what was expected and what came.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
import yaml

from refmodel.errors import InvalidInput, Where
from sim.cases.contradictions import contradictions
from sim.cases.scenario import Scenario
from sim.histories import contradictions as of_histories
from sim.histories.history import History

if TYPE_CHECKING or not yaml.__with_libyaml__:
    from yaml import SafeLoader as _SafeLoader
else:  # several times as fast; PyYAML has it wherever it comes as a wheel
    from yaml import CSafeLoader as _SafeLoader

AnyScenario: TypeAlias = Scenario | History


class _UniqueKeys(_SafeLoader):
    """YAML lets a repeated key silently win; a scenario must not say a thing twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            keys = [self.construct_object(key) for key, _ in node.value]
            i = next(i for i, key in enumerate(keys) if key in keys[:i])
            raise yaml.constructor.ConstructorError(
                None, None, f"key {keys[i]!r} twice", node.value[i][0].start_mark
            )
        return mapping


def load_scenario(path: Path) -> AnyScenario:
    """Read and check one file. :class:`InvalidInput` names the file and the path in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            "scenario file", expected="a readable YAML file", received=str(error), where=Where(file=str(path))
        ) from error
    return parse_scenario(text, str(path))


def parse_scenario(text: str, file: str) -> AnyScenario:
    """Check the text of a scenario; ``file`` is named in errors and replay lines."""
    try:
        raw = yaml.load(text, _UniqueKeys)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = Where(file=file, line=mark.line + 1 if mark else None)
        problem = getattr(error, "problem", None) or str(error)
        raise InvalidInput(
            "scenario", expected="valid YAML, each key once", received=f"an error: {problem}", where=where
        ) from error
    kind: type[AnyScenario] = History if isinstance(raw, dict) and "history" in raw else Scenario
    try:
        scenario: AnyScenario = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _typed_error(str(error), raw, file, kind) from error
    _check_meaning(scenario, file)
    return msgspec.structs.replace(scenario, file=file)


_PAGE = {Scenario: "docs/scenarios.md", History: "docs/histories.md"}


def _typed_error(message: str, raw: object, file: str, kind: type[AnyScenario]) -> InvalidInput:
    """msgspec says "Expected `int` >= 1 - at `$.steps[0].padding`"; add what was there instead."""
    problem, _, place = message.partition(" - at ")
    path = place.strip("`").removeprefix("key` in `").removeprefix("$").removeprefix(".")
    unknown = re.match(r"Object contains unknown field `(.*)`", problem)
    missing = re.match(r"Object missing required field `(.*)`", problem)
    if unknown:
        expected, received = "only known keys", f"unknown key {unknown[1]!r}"
    elif missing:
        expected, received = f"key {missing[1]!r}", "nothing"
    elif place.startswith("`key`"):
        expected, received = "keys that are text", repr(_value_at(raw, path))
    elif problem.startswith("Invalid enum value"):
        expected = f"one of {', '.join(_choices_of(kind)[re.findall(r'[a-z_]+', path)[-1]])}"
        received = repr(_value_at(raw, path))
    else:
        expected = problem.partition(", got")[0].removeprefix("Expected ").replace("`", "")
        received = repr(_value_at(raw, path))
    return InvalidInput(
        "scenario",
        expected=expected,
        received=received,
        where=Where(file=file, path=path or "the whole file"),
        fix=f"The keys are described in {_PAGE[kind]}.",
    )


def _choices_of(struct: type) -> dict[str, tuple[str, ...]]:
    """What may be said to each key that takes a name, in a struct and those inside it."""
    found: dict[str, tuple[str, ...]] = {}
    for key, hint in get_type_hints(struct).items():
        for part in _parts(hint):
            if get_origin(part) is Literal:
                found[key] = get_args(part)
            elif isinstance(part, type) and issubclass(part, Enum):
                found[key] = tuple(member.value for member in part)
            elif isinstance(part, type) and issubclass(part, msgspec.Struct):
                found = _choices_of(part) | found
    return found


def _parts(hint: Any) -> Iterator[Any]:
    """A type, and those it is made of: ``list[Step] | None`` has Step among them."""
    yield hint
    if get_origin(hint) is not Literal:
        for argument in get_args(hint):
            yield from _parts(argument)


def _value_at(raw: Any, path: str) -> object:
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            raw = raw[key] if key else raw[int(index)]
        except (KeyError, IndexError, TypeError):
            return raw
    return raw


def _check_meaning(scenario: AnyScenario, file: str) -> None:
    found = (
        of_histories.contradictions(scenario) if isinstance(scenario, History) else contradictions(scenario)
    )
    for path, expected, received in found:
        raise InvalidInput(
            "scenario", expected=expected, received=received, where=Where(file=file, path=path)
        )


def catalogue() -> Iterator[AnyScenario]:
    """Every scenario that ships with cpkv, by theme and name. ``file`` is relative to the catalogue."""
    root = Path(str(files("scenarios")))
    for path in sorted(root.glob("*/*.yaml")):
        scenario = load_scenario(path)
        yield msgspec.structs.replace(scenario, file=str(path.relative_to(root)))


def find_scenarios(name: str) -> list[AnyScenario]:
    """The scenarios a user means: a file, a folder, or a name or theme of the catalogue."""
    path = Path(name)
    if path.is_file():
        return [load_scenario(path)]
    if path.is_dir():
        found = [load_scenario(file) for file in sorted(path.rglob("*.yaml"))]
    else:
        found = [s for s in catalogue() if name in {s.file, s.file.removesuffix(".yaml"), theme_of(s)}]
    if not found:
        raise InvalidInput(
            "scenario",
            expected="a YAML file, a folder of them, or a name or theme of the catalogue",
            received=name,
            fix="`cpkv gate --list` shows the catalogue.",
        )
    return found


def theme_of(scenario: AnyScenario) -> str:
    """The folder a scenario lies in."""
    return Path(scenario.file).parent.name
