"""What is exported is what the schema of flashinfer-bench says, and means what the operation means.

The rules below are those that its documentation states: they share nothing with what writes the files.
"""

from __future__ import annotations

import ast
import json
import math
import struct
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch

from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from properties.kernels.flashinfer_bench import export
from properties.kernels.tensor_file import save_tensors
from refmodel.errors import InvalidInput
from refmodel.ops.catalogue import OPS

DTYPES = {
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1"),
    *("int64", "int32", "int16", "int8", "bool"),
}
FILE_DTYPES = {
    "BOOL": torch.bool, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
ALONE = [name for name, op in OPS.items() if not op.collective]


def faults_of(definition: dict[str, Any]) -> Iterator[str]:
    """What the schema does not allow."""
    for field in ("name", "op_type", "axes", "inputs", "outputs", "reference"):
        if not definition.get(field):
            yield f"no {field}"
    known = {
        "name",
        "op_type",
        "tags",
        "description",
        "axes",
        "inputs",
        "outputs",
        "reference",
        "constraints",
    }
    yield from (f"unknown field {field}" for field in definition.keys() - known)
    for axis, said in definition["axes"].items():
        whole = said["type"] == "const" and isinstance(said.get("value"), int) and said["value"] >= 0
        if not (whole or (said["type"] == "var" and "value" not in said)):
            yield f"axis {axis}"
    for name, tensor in (definition["inputs"] | definition["outputs"]).items():
        if tensor["dtype"] not in DTYPES:
            yield f"dtype of {name}"
        yield from (f"axis of {name}" for axis in tensor["shape"] or () if axis not in definition["axes"])
    if definition["inputs"].keys() & definition["outputs"].keys():
        yield "a name that is an input and an output"
    body = ast.parse(definition["reference"]).body
    runs = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    if [[given.arg for given in node.args.args] for node in runs] != [list(definition["inputs"])]:
        yield "reference"
    for constraint in definition.get("constraints", []):
        ast.parse(constraint, mode="eval")


def faults_of_workload(line: dict[str, Any], definition: dict[str, Any]) -> Iterator[str]:
    """What the schema does not allow in a line of a workload file."""
    if line.keys() != {"definition", "workload", "solution", "evaluation"}:
        yield "fields"
    if line["definition"] != definition["name"] or (line["solution"], line["evaluation"]) != (None, None):
        yield "not a workload of the definition"
    workload = line["workload"]
    UUID(workload["uuid"])
    variable = {axis for axis, said in definition["axes"].items() if said["type"] == "var"}
    if workload["axes"].keys() != variable or any(
        type(size) is not int for size in workload["axes"].values()
    ):
        yield "axes"
    if list(workload["inputs"]) != list(definition["inputs"]):
        yield "inputs"
    for name, said in workload["inputs"].items():
        scalar = definition["inputs"][name]["shape"] is None
        fields = {"type", "value"} if scalar else {"type", "path", "tensor_key"}
        if said.keys() != fields or said["type"] != ("scalar" if scalar else "safetensors"):
            yield f"input {name}"


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    found = {}
    for name, said in json.loads(content[8 : 8 + length]).items():
        first, end = (8 + length + place for place in said["data_offsets"])
        dtype = FILE_DTYPES[said["dtype"]]
        assert end - first == math.prod(said["shape"]) * dtype.itemsize
        data = torch.tensor(list(content[first:end]), dtype=torch.uint8)
        found[name] = data.view(dtype).view(said["shape"])
    return found


def the_only(folder: Path, pattern: str) -> Path:
    (path,) = folder.rglob(pattern)
    return path


def small(op: str) -> Case:
    """A corner with something in every tensor, of types that the schema has."""
    for case in CASES[op].corners():
        arguments = case.arguments()
        sizes = [value.numel() for value in arguments.values() if isinstance(value, torch.Tensor)]
        if all(sizes) and torch.float64 not in case.dtypes:
            return case
    raise AssertionError(f"no corner of {op} has something in every tensor")


@pytest.mark.parametrize("op", ALONE)
def test_a_failing_case_becomes_a_definition_and_a_workload(op: str, tmp_path: Path) -> None:
    case = small(op)
    written = export([case], tmp_path)
    assert not written.left_out
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(written.files)
    definition_file = the_only(tmp_path / "definitions", "*.json")
    definition = json.loads(definition_file.read_text())
    assert list(faults_of(definition)) == []
    # The tools of the project look a definition up by where its file lies.
    assert definition_file.stem == definition["name"]
    assert definition_file.parent.name == definition["op_type"]
    lines = the_only(tmp_path / "workloads" / definition["op_type"], f"{definition['name']}.jsonl")
    (line,) = map(json.loads, lines.read_text().splitlines())
    assert list(faults_of_workload(line, definition)) == []
    assert_right(case, definition, line["workload"], tmp_path)


def assert_right(case: Case, definition: dict[str, Any], workload: dict[str, Any], root: Path) -> None:
    """The reference that is exported gives, for the inputs that are, what the operation's does."""
    sizes = {axis: said.get("value") for axis, said in definition["axes"].items()} | workload["axes"]
    inputs, before = {}, {}
    for name, said in workload["inputs"].items():
        inputs[name] = said["value"] if said["type"] == "scalar" else read(root / said["path"])[name]
        if said["type"] == "safetensors":
            spec = definition["inputs"][name]
            assert list(inputs[name].shape) == [sizes[axis] for axis in spec["shape"]]
            assert str(inputs[name].dtype) == f"torch.{spec['dtype']}"
            before[name] = inputs[name].clone()
    space: dict[str, Any] = {}
    exec(definition["reference"], space)
    given = space["run"](**inputs)
    outputs = given if isinstance(given, tuple) else (given,)
    arguments = case.arguments()
    expected = case.op.outcome(arguments, case.op.reference(**arguments))
    for spec, got, right in zip(definition["outputs"].values(), outputs, expected, strict=True):
        assert list(got.shape) == [sizes[axis] for axis in spec["shape"]]
        assert str(got.dtype) == f"torch.{spec['dtype']}"
        assert same_bits(got, right)
    assert all(same_bits(inputs[name], value) for name, value in before.items()), "inputs were changed"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def broken(definition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Definitions that the schema does not allow."""
    yield definition | {"name": ""}
    yield definition | {"axes": definition["axes"] | {"width": {"type": "const"}}}
    yield definition | {"reference": "def walk(): ..."}
    yield definition | {"outputs": {"buffers": definition["inputs"]["buffers"]}}
    yield definition | {"author": "x"}
    for change in ({"dtype": "uint8"}, {"shape": ["nowhere"]}):
        other = deepcopy(definition)
        other["inputs"]["buffers"] |= change
        yield other


def test_the_rules_refuse_what_the_schema_does_not_allow(tmp_path: Path) -> None:
    export([small("rerange")], tmp_path)
    definition = json.loads(the_only(tmp_path / "definitions", "*.json").read_text())
    assert all(list(faults_of(other)) for other in broken(definition))


def test_cases_of_one_kind_share_a_definition_and_others_do_not(tmp_path: Path) -> None:
    cases = [case for case in CASES["sparse_mla"].corners() if torch.float64 not in case.dtypes]
    export(cases, tmp_path)
    names = {path.stem for path in (tmp_path / "definitions").rglob("*.json")}
    lines = [line for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert 1 < len(names) < len(cases) == len(lines)
    assert len({json.loads(line)["workload"]["uuid"] for line in lines}) == len(cases)


def test_the_same_case_is_written_the_same_again(tmp_path: Path) -> None:
    case = small("materialize")
    first, second = (export([case], tmp_path / name) for name in ("first", "second"))
    assert [path.read_bytes() for path in first.files] == [path.read_bytes() for path in second.files]
    assert len(export([case], tmp_path / "first").files) == len(first.files)


def test_what_the_schema_cannot_say_is_left_out_and_named(tmp_path: Path) -> None:
    wide = [case for case in CASES["sparse_mla"].corners() if torch.float64 in case.dtypes]
    across = [next(iter(CASES[name].corners())) for name, op in OPS.items() if op.collective]
    written = export([*wide, *across], tmp_path)
    assert not written.files
    assert len(written.left_out) == len(wide) + len(across) >= 2
    assert "float64" in written.left_out[0]
    assert "collective" in written.left_out[-1]
    assert not list(tmp_path.iterdir())


def test_a_type_that_the_file_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="dtype of x"):
        save_tensors(tmp_path / "x", {"x": torch.zeros(1, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())
