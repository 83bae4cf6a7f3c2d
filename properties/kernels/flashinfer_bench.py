"""Operations and the cases that a kernel failed, as a data set of flashinfer-bench.

A *definition* says what an operation takes and gives, and has its reference as source with a function
``run``; a *workload* is one input of it. They are laid out as that project's tools expect: ``definitions/``,
``workloads/`` and ``blob/`` below one folder. Its schema has no bytes and no tuples: uint8 travels as int8 of
the same bits, a tuple of ints as int64 [n]. What it cannot say is left out and named: collectives, float64.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from properties.kernels.cases.case import Case
from properties.kernels.tensor_file import save_tensors
from refmodel.errors import InvalidInput
from refmodel.ops.op import Argument, Kind, Op

OP_TYPE = "cp_shared_kv"
PACKAGE = "cpkv-testbed"

DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.bool: "bool",
}

# Words of a dim that a model or a byte format fixes. Any other dim differs from input to input.
FIXED = {
    "bytes",
    "dim",
    "fields",
    "heads",
    "hidden",
    "k",
    "latent",
    "layers",
    "rope",
    "size",
    "vocab",
    "width",
}

SIGNS = {"×": " times ", "·": " times ", "*": " times ", "+": " plus ", "/": " over "}


@dataclass(frozen=True, slots=True)
class Exported:
    """What a call of :func:`export` wrote, and what it could not."""

    files: tuple[Path, ...]
    left_out: tuple[str, ...]  # a sentence a case


def export(cases: Iterable[Case], folder: Path) -> Exported:
    """Write a definition for each kind of input among ``cases``, and a workload for each case.

    ``folder`` may hold a data set: definitions of the same name are replaced, and so are their workloads.
    """
    files: list[Path] = []
    left_out: list[str] = []
    workloads: dict[Path, list[dict[str, Any]]] = {}
    for case in cases:
        try:
            problem = _Problem(case)
        except InvalidInput as error:
            left_out.append(f"{case!r}: {error}")
            continue
        definition = folder / "definitions" / OP_TYPE / f"{problem.name}.json"
        _write(definition, msgspec.json.format(msgspec.json.encode(problem.definition()), indent=2) + b"\n")
        lines = folder / "workloads" / OP_TYPE / f"{problem.name}.jsonl"
        workloads.setdefault(lines, []).append(problem.workload(folder))
        files += [definition, folder / problem.blob]
    for lines, entries in workloads.items():
        _write(lines, b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
        files.append(lines)
    return Exported(tuple(dict.fromkeys(files)), tuple(left_out))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


class _Problem:
    """One case, said in the terms of the schema."""

    def __init__(self, case: Case) -> None:
        self.case, self.op = case, case.op
        if self.op.collective:
            raise InvalidInput(self.op.name, expected="an operation of one rank", received="a collective")
        self.arguments = case.arguments()
        self.axes: dict[str, int] = {}
        self.inputs = {
            argument.name: self._tensor(argument, self.arguments[argument.name])
            for argument in self.op.arguments
            if argument.kind is not Kind.WORD  # the schema has no strings: they are part of the reference
        }
        self.outputs = self._outputs()

    # -- tensors ---------------------------------------------------------------------------------------------

    def _tensor(self, argument: Argument, value: Any) -> dict[str, Any]:
        match argument.kind:
            case Kind.VALUES | Kind.INDEX:
                sizes, dtype = tuple(value.shape), value.dtype
            case Kind.INTS:
                sizes, dtype = (len(value),), torch.int64
            case _:
                name = "float32" if argument.kind is Kind.FLOAT else "int64"
                return {"shape": None, "dtype": name, "description": argument.meaning}
        return self._spec(argument.name, argument.shape, sizes, dtype, argument.meaning)

    def _outputs(self) -> dict[str, Any]:
        spaces = self.op.spaces(**self.arguments)
        written = {
            _written(name): {**self.inputs[name], "description": "as it is afterwards"}
            for name in self.op.written
        }
        return written | {
            result.name: self._spec(result.name, result.shape, space.shape, space.dtype, result.meaning)
            for result, space in zip(self.op.results, spaces, strict=True)
        }

    def _spec(
        self, name: str, dims: str, sizes: tuple[int, ...], dtype: torch.dtype, meaning: str
    ) -> dict[str, Any]:
        if dtype not in DTYPES:
            known = ", ".join(dict.fromkeys(DTYPES.values()))
            raise InvalidInput(
                f"dtype of {name}", expected=f"one that the schema has: {known}", received=dtype
            )
        named = axis_names(dims)
        if len(named) != len(sizes):  # "by layout"
            named = [f"{name}_{place}" for place in range(len(sizes))]
        shape = []
        for place, (axis, size) in enumerate(zip(named, sizes, strict=True)):
            # A word may stand for two lengths, as `n` of two tensors does; a name may not.
            own = axis if self.axes.setdefault(axis, size) == size else f"{name}_{place}"
            self.axes[own] = size
            shape.append(own)
        return {"shape": shape, "dtype": DTYPES[dtype], "description": meaning or name}

    # -- what the schema asks for ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``sparse_mla_heads16_latent512_bfloat16``: what fixes the definition."""
        values = [argument.name for argument in self.op.arguments if argument.kind is Kind.VALUES]
        dtypes = dict.fromkeys(self.inputs[each]["dtype"] for each in values)
        fixed = [f"{axis}{size}" for axis, size in self.axes.items() if is_fixed(axis)]
        return "_".join([self.op.name, *fixed, *self._words.values(), *dtypes]).lower()

    @property
    def uuid(self) -> str:
        """The same for the same case, in every run."""
        said = f"{self.op.name} {msgspec.json.encode(self.case).decode()}"
        return str(uuid.uuid5(uuid.NAMESPACE_URL, said))

    @property
    def blob(self) -> Path:
        """The file with the tensors, below the folder of the data set."""
        return Path("blob", "workloads", OP_TYPE, self.name, f"{self.name}_{self.uuid}.safetensors")

    @property
    def _words(self) -> dict[str, str]:
        words = (argument.name for argument in self.op.arguments if argument.kind is Kind.WORD)
        return {name: self.arguments[name] for name in words}

    @property
    def _bytes(self) -> list[str]:
        """Arguments that the schema has in another type."""
        return [name for name, value in self.arguments.items() if _is_bytes(value)]

    def definition(self) -> dict[str, Any]:
        """What the operation is, for inputs of this kind."""
        laws = ", ".join(self.op.laws)
        return {
            "name": self.name,
            "op_type": OP_TYPE,
            "description": f"{self.op.meaning} Laws {laws} of cpkv; compared {self.op.compared}.",
            "tags": ["stage:prefill", "source:cpkv", *(f"law:{law_id}" for law_id in self.op.laws)],
            "axes": {axis: _axis(axis, size) for axis, size in self.axes.items()},
            "constraints": [],
            "inputs": self.inputs,
            "outputs": self.outputs,
            "reference": reference_source(self.op, self._words, self._bytes),
        }

    def workload(self, folder: Path) -> dict[str, Any]:
        """This case as a line of a workload file; its tensors are written below ``folder``."""
        tensors, inputs = {}, {}
        for name, spec in self.inputs.items():
            value = self.arguments[name]
            if spec["shape"] is None:
                inputs[name] = {"type": "scalar", "value": value}
                continue
            inputs[name] = {"type": "safetensors", "path": self.blob.as_posix(), "tensor_key": name}
            tensors[name] = _portable(value)
        path = folder / self.blob
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, tensors)
        axes = {axis: size for axis, size in self.axes.items() if not is_fixed(axis)}
        return {
            "definition": self.name,
            "workload": {"uuid": self.uuid, "axes": axes, "inputs": inputs},
            "solution": None,
            "evaluation": None,
        }


def axis_names(dims: str) -> list[str]:
    """Names of the dims that an operation writes for people.

    >>> axis_names("[world_size × most rows, width]")
    ['world_size_times_most_rows', 'width']
    """
    for sign, word in SIGNS.items():
        dims = dims.replace(sign, word)
    names = [
        re.sub(r"\W+", "_", dim.strip()).strip("_") for dim in dims.strip("[]").split(",") if dim.strip()
    ]
    return [f"size_{name}" if name.isdigit() else name for name in names]


def is_fixed(axis: str) -> bool:
    """Whether an axis is part of what the definition is, rather than of one input.

    >>> is_fixed("latent_plus_rope"), is_fixed("rows")
    (True, False)
    """
    return bool(FIXED & set(axis.split("_")))


def _axis(axis: str, size: int) -> dict[str, Any]:
    described = {"description": axis.replace("_", " ")}
    return {"type": "const", "value": size, **described} if is_fixed(axis) else {"type": "var", **described}


def _written(name: str) -> str:
    return f"{name}_after"


def _portable(value: Any) -> torch.Tensor:
    """As the schema has it: int8 for bytes, int64 [n] for a tuple of ints."""
    tensor = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.int64)
    return tensor.view(torch.int8) if _is_bytes(tensor) else tensor


def _is_bytes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8


def reference_source(op: Op, words: Mapping[str, str], as_int8: Iterable[str]) -> str:
    """Source with a function ``run`` of the schema's inputs, which calls the reference of the operation.

    Inputs stay as they were: what the operation writes in place comes back as a result. ``as_int8``: bytes,
    which come in that type.
    """
    names = [argument.name for argument in op.arguments if argument.kind is not Kind.WORD]
    tuples = [argument.name for argument in op.arguments if argument.kind is Kind.INTS]
    lines = [
        f'"""{op.signature}: {op.meaning} Needs the package {PACKAGE}."""',
        "",
        "import torch",
        "",
        "from refmodel.ops.catalogue import OPS",
        "",
        "",
        "@torch.no_grad()",
        f"def run({', '.join(names)}):",
        f'    op = OPS["{op.name}"]',
        *(f"    {name} = {value!r}" for name, value in words.items()),
        *(f"    {name} = {name}.view(torch.uint8)" for name in as_int8),
        *(f"    {name} = {name}.clone()" for name in op.written),
        *(f"    {name} = tuple({name}.tolist())" for name in tuples),
        f"    results = op.reference({', '.join(argument.name for argument in op.arguments)})",
        f"    outputs = [{''.join(f'{name}, ' for name in op.written)}*results]",
        "    outputs = [one.view(torch.int8) if one.dtype == torch.uint8 else one for one in outputs]",
        "    return tuple(outputs) if len(outputs) > 1 else outputs[0]",
    ]
    return "\n".join(lines) + "\n"
