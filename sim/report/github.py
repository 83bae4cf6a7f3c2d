"""A gate run as GitHub Actions annotations: each finding beside the file it is about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sim.gate.record import Broken, Entry, Report
from sim.report.text import headline


def annotation_lines(report: Report) -> Iterator[str]:
    """Workflow commands, one line each, to be printed on standard output."""
    for entry in report.broken:
        for finding in entry.findings:
            yield _annotation(finding, entry)
    if report.marks.missing:
        yield f"::error title=cpkv gate::the catalogue never reached {', '.join(report.marks.missing)}"


def _annotation(finding: Broken, entry: Entry) -> str:
    title = f"{finding.law} in {entry.name} on {entry.world}"
    place = f" ({finding.place})" if finding.place else ""
    message = (
        f"{finding.what}: expected {finding.expected}, got {finding.received}{place}\n"
        f"{headline(finding)}\nreplay: {entry.replay}"
    )
    file = _file_here(entry)
    target = f"file={_property(file)}," if file else ""
    return f"::error {target}title={_property(title)}::{_data(message)}"


def _file_here(entry: Entry) -> str | None:
    """The file as seen from here; a catalogue scenario is only here in cpkv's own repository."""
    candidates = (Path(entry.file), Path("scenarios") / entry.file)
    return next((str(path) for path in candidates if path.is_file()), None)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
