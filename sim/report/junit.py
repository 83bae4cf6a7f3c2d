"""A gate run as JUnit XML: one test case a scenario and world, themes as classes."""

from __future__ import annotations

import re
from itertools import groupby
from xml.etree import ElementTree as ET

from sim.gate.record import Entry, Report
from sim.gate.verdict import INFRASTRUCTURE
from sim.report.text import finding_lines, headline

# XML 1.0 has no way to write these.
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(report: Report) -> bytes:
    """The document; the reachability marks are a test case of their own when they were judged."""
    root = ET.Element("testsuites", name="cpkv gate")
    by_theme = sorted(report.runs, key=lambda entry: entry.theme)
    for theme, entries in groupby(by_theme, key=lambda entry: entry.theme):
        suite = ET.SubElement(root, "testsuite", name=theme)
        for entry in entries:
            _add_entry(suite, entry)
    if report.marks.missing is not None:
        _add_marks(ET.SubElement(root, "testsuite", name="reachability"), report.marks.missing)
    for suite in root:
        _count(suite, [suite])
    _count(root, list(root))
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _add_entry(suite: ET.Element, entry: Entry) -> None:
    name = f"{entry.name} on {entry.world}"
    case = ET.SubElement(suite, "testcase", classname=entry.theme, name=name, time=f"{entry.seconds:.3f}")
    case.set("file", entry.file)
    if entry.retried:
        properties = ET.SubElement(case, "properties")
        ET.SubElement(properties, "property", name="retried", value="true")
    for finding in entry.findings:
        message = f"{finding.law}: {finding.what}: expected {finding.expected}, got {finding.received}"
        # JUnit's word for a test that could not say anything is an error.
        tag = "error" if finding.law == INFRASTRUCTURE else "failure"
        failure = ET.SubElement(case, tag, type=finding.law, message=_legal(message))
        lines = (f"{name}: {value}" for name, value in finding_lines(finding))
        failure.text = _legal("\n".join([headline(finding), *lines, f"replay: {entry.replay}"]))


def _add_marks(suite: ET.Element, missing: list[str]) -> None:
    case = ET.SubElement(suite, "testcase", classname="reachability", name="marks", time="0")
    if missing:
        message = f"the catalogue never reached: {', '.join(missing)}"
        ET.SubElement(case, "failure", type="reachability", message=message)


def _count(element: ET.Element, suites: list[ET.Element]) -> None:
    cases = [case for suite in suites for case in suite.iter("testcase")]
    element.set("tests", str(len(cases)))
    for tag in ("failure", "error"):
        element.set(f"{tag}s", str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")


def _legal(text: str) -> str:
    return _NOT_IN_XML.sub("�", text)
