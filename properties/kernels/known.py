"""Known failures: what is wrong and says so. One that passes is a failure, so that the list stays short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from properties.kernels.faults import STATEMENTS
from refmodel.errors import InvalidInput, Where
from refmodel.laws import LAWS
from refmodel.ops.catalogue import OPS


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One failure that is known."""

    op: str
    law: str  # a law, or a kind of failure, that is broken
    reason: str  # why that is so for now; an issue, say


def read_known(file: Path) -> tuple[Known, ...]:
    """The list in a YAML file. :class:`InvalidInput`, naming file and entry, if it makes no sense.

    - {op: sparse_mla, law: A4, reason: "rows without keys give NaN, issue 12"}
    """
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
        entries = msgspec.convert(given or [], type=list[Known])
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise InvalidInput(
            "known failures",
            expected="a list of entries with op, law and reason",
            received=str(error),
            where=Where(file=str(file)),
        ) from error
    for number, entry in enumerate(entries):
        _check(entry, Where(file=str(file), path=f"[{number}]"))
    _refuse_twice(entries, file)
    return tuple(entries)


def _check(entry: Known, where: Where) -> None:
    if entry.op not in OPS:
        raise InvalidInput("op", expected=f"one of {', '.join(sorted(OPS))}", received=entry.op, where=where)
    if entry.law not in LAWS and entry.law not in STATEMENTS:
        expected = f"a law, or one of {', '.join(STATEMENTS)}"
        raise InvalidInput("law", expected=expected, received=entry.law, where=where)
    if not entry.reason.strip():
        raise InvalidInput("reason", expected="why it fails, for now", received="nothing", where=where)


def _refuse_twice(entries: Sequence[Known], file: Path) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.op in seen:
            raise InvalidInput(
                "known failures",
                expected="one entry an operation",
                received=f"two of {entry.op}",
                where=Where(file=str(file)),
            )
        seen.add(entry.op)
