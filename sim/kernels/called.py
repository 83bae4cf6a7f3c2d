"""How a kernel is called where the reference would be: within what it declares, and its results looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refmodel.errors import CpkvError
from refmodel.ops.op import Argument, Arguments, Kind, Op, Results, Space
from sim.kernels.candidate import Candidate
from sim.kernels.seams.seam import Unsuited

_INDEX = {"int64": torch.int64, "int32": torch.int32}
_LARGE = 2.0**14  # stands for NaN where a kernel says that it meets none


class WrongResult(CpkvError):
    """A kernel's result has another shape, type or device than its arguments say."""


@dataclass(frozen=True, slots=True)
class Given:
    """Arguments as a kernel gets them."""

    arguments: Arguments
    back: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # (copy that it writes, what is meant to be written)
    device: torch.device | None  # where results are wanted; None: they have no other place to be


@dataclass(frozen=True, slots=True)
class Called:
    """One kernel, by what it declares."""

    candidate: Candidate

    @property
    def op(self) -> Op:
        return self.candidate.op

    def given(self, values: Sequence[Any]) -> Given:
        """Arguments in order → as the kernel takes them. :class:`Unsuited` if it declares that it does not.

        A conversion loses nothing: indices become those of 32 bits if it takes no others, numbers another
        type only if that holds them exactly.
        """
        arguments: dict[str, Any] = {}
        back: list[tuple[torch.Tensor, torch.Tensor]] = []
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        device = self._device({tensor.device for tensor in tensors})
        for argument, value in zip(self.op.arguments, values, strict=True):
            if isinstance(value, torch.Tensor):
                suited = self._tensor(argument, value, device)
                if argument.written and suited.data_ptr() != value.data_ptr():
                    back.append((suited, value))
                arguments[argument.name] = suited
            else:
                self._require_page(argument, value)
                arguments[argument.name] = tuple(value) if argument.kind is Kind.INTS else value
        self._require_width(arguments)
        where = tensors[0].device if tensors and device is not None else None
        return Given(arguments, tuple(back), where)

    def results(self, given: Given) -> Results:
        """Call it; what is to be written is written, and results are where the arguments were.

        :class:`WrongResult` if they are not what the arguments say.
        """
        spaces = self.op.spaces(**given.arguments)
        tensors = [value for value in given.arguments.values() if isinstance(value, torch.Tensor)]
        device = tensors[0].device
        out = None
        if self.candidate.needs_out:
            out = tuple(torch.empty(space.shape, dtype=space.dtype, device=device) for space in spaces)
        with torch.no_grad():
            results = self.candidate.run(given.arguments, out)
        for space, result, said in zip(spaces, results, self.op.results, strict=True):
            _check(f"{said.name} of {self.op.name}", space, device, result)
        for copy, meant in given.back:
            meant.copy_(copy)
        return tuple(result if given.device is None else result.to(given.device) for result in results)

    # -- within what is declared ---------------------------------------------------------------------------

    def _device(self, devices: set[torch.device]) -> torch.device | None:
        """Another place to call it at, if it cannot do where the tensors are; None: there."""
        able = self.candidate.capabilities.devices
        if not able or all(device.type in able for device in devices):
            return None
        # What travels is where its group wants it, and a copy between devices has tensors on both.
        if len(devices) > 1 or self.op.collective or "cuda" not in able or not torch.cuda.is_available():
            raise Unsuited
        return torch.device("cuda", torch.cuda.current_device())

    def _require_width(self, arguments: Arguments) -> None:
        able, width = self.candidate.capabilities.widths, self.op.row_width
        if able and width is not None and width(**arguments) not in able:
            raise Unsuited

    def _require_page(self, argument: Argument, value: Any) -> None:
        able = self.candidate.capabilities.page_sizes
        if argument.name == "page_size" and able and value not in able:
            raise Unsuited

    def _tensor(self, argument: Argument, tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        tensor = tensor.to(self._dtype(argument, tensor))
        if tensor.is_floating_point() and not self.candidate.capabilities.tail_nan and not argument.written:
            tensor = torch.where(tensor.isnan(), _LARGE, tensor)
        if device is not None:
            tensor = tensor.to(device)
        return tensor.contiguous() if self.candidate.capabilities.contiguous else tensor

    def _dtype(self, argument: Argument, tensor: torch.Tensor) -> torch.dtype:
        if argument.kind is Kind.INDEX:
            able = [_INDEX[name] for name in self.candidate.capabilities.index_dtypes]
            return tensor.dtype if tensor.dtype in able else able[0]
        able = [dtype for dtype in self._dtypes(argument) if _holds(dtype, tensor)]
        if not able and self._dtypes(argument):
            raise Unsuited
        return able[0] if able and tensor.dtype not in able else tensor.dtype

    def _dtypes(self, argument: Argument) -> tuple[torch.dtype, ...]:
        """That an argument may have; none: any."""
        declared = self.candidate.capabilities.dtypes
        if not declared or len(argument.dtypes) == 1:
            return argument.dtypes
        if not argument.dtypes:
            return declared
        return tuple(dtype for dtype in declared if dtype in argument.dtypes) or argument.dtypes


def _holds(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether a type holds a tensor's values, NaN aside."""
    if dtype == tensor.dtype:
        return True
    if not (dtype.is_floating_point and tensor.is_floating_point()):
        return False
    back = tensor.to(dtype).to(tensor.dtype)
    return bool(((back == tensor) | tensor.isnan()).all())


def _check(what: str, space: Space, device: torch.device, result: torch.Tensor) -> None:
    expected = f"{space.dtype} {list(space.shape)} on {device.type}"
    received = f"{result.dtype} {list(result.shape)} on {result.device.type}"
    if expected != received:
        raise WrongResult(what, expected=expected, received=received)
