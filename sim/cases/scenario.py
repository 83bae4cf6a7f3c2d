"""Scenario files: YAML, strictly typed. A file names what happens; :mod:`sim.cases.case` works out the rest.

Errors name the file, the path in it, what was expected and what came.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import yaml

from refmodel.attention.transform import Transform
from refmodel.errors import CpkvError, InvalidInput, Where
from refmodel.laws import law
from refmodel.layout.split import Split
from refmodel.storage.reuse import ViewPath
from refmodel.storage.write import WritePath
from sim.cases.arithmetic import Ids

AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 23)]  # what fits in an identity
Cached = Annotated[int, msgspec.Meta(ge=0, le=1 << 23)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Check = Literal["identity", "bytes", "isolation", "attention"]
Placement = Literal["compute_owner", "scrambled"]
Format = Literal["tag", "f64", "f32", "bf16", "fp8"]
Kind = Literal["lockstep", "gloo"]


class Extend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request in a step."""

    request: Text
    tokens: Tokens
    prefix: Cached | None = None  # default: what the request's earlier steps left
    rotation: AtLeast0 = 0


class Expect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worked numbers of a step; what is left out is not compared."""

    segments: list[list[int]] | None = None  # [requests][2W] tokens
    bounds: list[list[int]] | None = None  # [requests][2W + 1] absolute positions
    units: list[list[int]] | None = None  # [requests] [first, stop) page positions
    rows: list[int] | None = None  # [W] local rows of each rank
    max_rank_rows: int | None = None
    prev_rows: list[int] | None = None  # [W] where each rank cuts its rows
    kv_stop: list[list[int]] | None = None  # [W] [prev, next] of the only request
    rank_rows: list[str] | None = None  # [W] e.g. "a[0:2] b[0:1] | a[4:5]"
    new_pages: list[int] | None = None  # [W] pages the step adds to each lane
    write: WritePath | None = None
    view: ViewPath | None = None


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One forward pass: a batch of extents, then padding rows."""

    extend: Annotated[list[Extend], msgspec.Meta(min_length=1)]
    padding: AtLeast0 = 0
    expect: Expect = Expect()


class Remap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worked number of the remap (O2)."""

    slot: int
    owner: int
    local_page: int
    physical: int


class Offsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worked number of the bytes of a cache in production sizes (F2)."""

    cache: Literal["kv", "index"]
    format: Literal["f64", "f32", "bf16", "fp8"]
    slot: AtLeast0
    fields: list[int]  # first byte of each field of the slot


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to the KV of some requests on W ranks, and what must hold."""

    title: Text
    why: Text
    laws: Annotated[list[str], msgspec.Meta(min_length=1)]
    world_size: AtLeast1
    page_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    steps: Annotated[list[Step], msgspec.Meta(min_length=1)]
    split: Split = Split.PAGE_ALIGNED
    incident: str | None = None  # the fault it exposes, e.g. "split-03"
    source: str | None = None  # where that fault was reported
    format: Format = "tag"
    layers: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    placement: Placement = "compute_owner"
    seed: AtLeast0 = 0  # of the scramble of page ids, and of the lanes of pages already in cache
    remap: tuple[Remap, ...] = ()
    offsets: tuple[Offsets, ...] = ()
    view: ViewPath = ViewPath.FULL  # what views are made of
    prefetch: bool = False
    transform: Transform = Transform.PAGED  # how chosen keys are named; like the next two, of the model
    ids: Ids = "random"
    top_k: AtLeast1 | None = None  # keys a row attends to; default: the tiny model's
    checks: tuple[Check, ...] = ("identity", "bytes", "isolation")
    worlds: tuple[Kind, ...] = ("lockstep",)  # where the gate runs it unless told otherwise
    # Where it was read: set by the loader, under a name that no YAML key can have by accident.
    file: str = msgspec.field(default="", name="<file>")


class _UniqueKeys(yaml.SafeLoader):
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


def load_scenario(path: Path) -> Scenario:
    """Read and check one file. :class:`InvalidInput` names the file and the path in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            "scenario file", expected="a readable YAML file", received=str(error), where=Where(file=str(path))
        ) from error
    return parse_scenario(text, str(path))


def parse_scenario(text: str, file: str) -> Scenario:
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
    try:
        scenario = msgspec.convert(raw, Scenario)
    except msgspec.ValidationError as error:
        raise _typed_error(str(error), raw, file) from error
    _check_meaning(scenario, file)
    return msgspec.structs.replace(scenario, file=file)


_CHOICES: dict[str, tuple[str, ...]] = {
    "split": tuple(split.value for split in Split),
    "write": tuple(path.value for path in WritePath),
    "format": get_args(Format),
    "view": tuple(path.value for path in ViewPath),
    "transform": tuple(transform.value for transform in Transform),
    "placement": get_args(Placement),
    "checks": get_args(Check),
    "worlds": get_args(Kind),
}


def _typed_error(message: str, raw: object, file: str) -> InvalidInput:
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
        expected = f"one of {', '.join(_CHOICES[re.findall(r'[a-z_]+', path)[-1]])}"
        received = repr(_value_at(raw, path))
    else:
        expected = problem.partition(", got")[0].removeprefix("Expected ").replace("`", "")
        received = repr(_value_at(raw, path))
    return InvalidInput(
        "scenario",
        expected=expected,
        received=received,
        where=Where(file=file, path=path or "the whole file"),
        fix="The keys are described in docs/scenarios.md.",
    )


def _value_at(raw: Any, path: str) -> object:
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            raw = raw[key] if key else raw[int(index)]
        except (KeyError, IndexError, TypeError):
            return raw
    return raw


def _check_meaning(scenario: Scenario, file: str) -> None:
    for path, expected, received in _contradictions(scenario):
        raise InvalidInput(
            "scenario", expected=expected, received=received, where=Where(file=file, path=path)
        )


def _contradictions(scenario: Scenario) -> Iterator[tuple[str, str, object]]:
    """(path, expected, received) of what types cannot say."""
    for i, law_id in enumerate(scenario.laws):
        try:
            law(law_id)
        except CpkvError as error:
            yield f"laws[{i}]", error.expected, law_id
    if "attention" in scenario.checks and scenario.format == "tag":
        yield "format", "f64, f32, bf16 or fp8 with the attention check", scenario.format
    if "attention" not in scenario.checks:
        if scenario.view is ViewPath.NONE:
            yield "view", "full, current or partial without the attention check", scenario.view.value
        for key, value, default in _of_the_model(scenario):
            if value != default:
                yield key, "no such key without the attention check: no model runs", value
    for i, step in enumerate(scenario.steps):
        for path, expected, received in _step_contradictions(scenario, step):
            yield f"steps[{i}].{path}", expected, received


def _of_the_model(scenario: Scenario) -> Iterator[tuple[str, object, object]]:
    """(key, value, default) of what only a model has a use for."""
    yield "transform", scenario.transform, Transform.PAGED
    yield "ids", scenario.ids, "random"
    yield "top_k", scenario.top_k, None


def _step_contradictions(scenario: Scenario, step: Step) -> Iterator[tuple[str, str, object]]:
    """Rotations fit the world, and a worked number exists under the split and batch it is stated for."""
    zigzag = scenario.split is not Split.ROUND_ROBIN
    for i, extend in enumerate(step.extend):
        stop = scenario.world_size if zigzag else 1
        if extend.rotation >= stop:
            expected = f"0 … {stop - 1}" if zigzag else "0 with split round_robin"
            yield f"extend[{i}].rotation", expected, extend.rotation
    of_segments = ("segments", "bounds", "prev_rows", "kv_stop", "rank_rows")
    for name in () if zigzag else of_segments:
        if getattr(step.expect, name) is not None:
            yield f"expect.{name}", "none: split round_robin has no segments", getattr(step.expect, name)
    if step.expect.units is not None and scenario.split is not Split.PAGE_ALIGNED:
        yield "expect.units", "none unless the split is page_aligned", step.expect.units
    if step.expect.kv_stop is not None and len(step.extend) > 1:
        yield "expect.kv_stop", "none in a batch of several requests", step.expect.kv_stop


def catalogue() -> Iterator[Scenario]:
    """Every scenario that ships with cpkv, by theme and name. ``file`` is relative to the catalogue."""
    root = Path(str(files("scenarios")))
    for path in sorted(root.glob("*/*.yaml")):
        scenario = load_scenario(path)
        yield msgspec.structs.replace(scenario, file=str(path.relative_to(root)))


def find_scenarios(name: str) -> list[Scenario]:
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


def theme_of(scenario: Scenario) -> str:
    """The folder a scenario lies in."""
    return Path(scenario.file).parent.name
