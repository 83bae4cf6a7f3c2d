"""Known failures do not break the check, and break it once they pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from properties.command_line import cpkv, refused
from properties.kernel_files import RIGHT, WRONG, Write


def test_a_known_failure_does_not_break_the_check(kernels: Write, tmp_path: Path) -> None:
    known = tmp_path / "known.yaml"
    known.write_text("- {op: logical_to_physical, law: O2, reason: being rewritten}\n")
    result = cpkv("check", kernels(WRONG), "--known", known)
    assert result.exit_code == 0
    assert "logical_to_physical: known, being rewritten" in result.output


def test_a_known_failure_that_passes_breaks_it(kernels: Write, tmp_path: Path) -> None:
    known = tmp_path / "known.yaml"
    known.write_text("- {op: logical_to_physical, law: O2, reason: being rewritten}\n")
    result = cpkv("check", kernels(RIGHT), "--known", known)
    assert result.exit_code == 1
    assert "unexpected pass: " in result.output


def test_a_failure_of_another_kind_is_not_the_known_one(kernels: Write, tmp_path: Path) -> None:
    known = tmp_path / "known.yaml"
    known.write_text("- {op: logical_to_physical, law: dtype, reason: being rewritten}\n")
    result = cpkv("check", kernels(WRONG), "--known", known)
    assert result.exit_code == 1
    assert "O2 broke" in result.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {op: logical_to_physical, law: O2}", "reason"),
        ("- {op: logical_to_physical, law: O2, reason: ' '}", "reason"),
        ("- {op: logical_to_physic, law: O2, reason: r}", "logical_to_physic"),
        ("- {op: logical_to_physical, law: O99, reason: r}", "O99"),
        ("- {op: rerange, law: S4, reason: r}\n- {op: rerange, law: S3, reason: r}", "two of rerange"),
        ("- [", "known.yaml"),
        ("op: rerange", "known.yaml"),
    ],
)
def test_a_list_of_known_failures_that_makes_no_sense_is_refused(
    kernels: Write, tmp_path: Path, text: str, said: str
) -> None:
    known = tmp_path / "known.yaml"
    known.write_text(text)
    assert said in refused("check", kernels(RIGHT), "--known", known)
