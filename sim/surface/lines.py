"""Which line of a program a call comes from, past torch's frames and ours."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FrameType

# Frames of these modules stand between a program and its group.
_PLUMBING = (
    "torch",
    "sim.surface",
    "sim.lockstep",
    "sim.processes",
    "sim.torchrun",
    "sim.faults",
    "refmodel.collectives",
    "contextlib",
)
# By the id of a code that calls came through: the code, which being kept leaves its id to nobody else; and by
# instruction the lines of it that were named, or None if it is plumbing.
_codes: dict[int, tuple[CodeType, dict[int, str] | None]] = {}


def line_of(frame: FrameType | None) -> str:
    """The line of the innermost frame that is neither torch's nor ours; "somewhere" if there is none."""
    while frame is not None:
        code = frame.f_code
        lines = (_codes.get(id(code)) or _meet(code, frame))[1]
        if lines is not None:
            place = frame.f_lasti
            return lines.get(place) or lines.setdefault(
                place, f"{Path(code.co_filename).name}:{frame.f_lineno}"
            )
        frame = frame.f_back
    return "somewhere"


def _meet(code: CodeType, frame: FrameType) -> tuple[CodeType, dict[int, str] | None]:
    module = frame.f_globals.get("__name__", "")
    is_plumbing = any(module == name or module.startswith(f"{name}.") for name in _PLUMBING)
    return _codes.setdefault(id(code), (code, None if is_plumbing else {}))
