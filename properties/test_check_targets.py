"""Targets: what is found in a file, a module or an entry point, and what is refused."""

from __future__ import annotations

import re
import sys

import pytest

from properties.kernel_files import RIGHT, Write
from refmodel.errors import InvalidInput
from sim.kernels.target import load_target


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("def rerang(buffers): ...", "Is rerang meant to be rerange?"),
        ("x = 1", "no functions"),
        ("def rerange(buffers, tokens, prefixes, world_size, page_size): ...", "buffers, prefixes, tokens"),
        ("def rerange(buffers, prefixes, tokens, world_size): ...", "rerange(buffers, prefixes, tokens"),
        ("def rerange(buffers, prefixes, tokens, world_size, page_size, extra): ...", "more need defaults"),
        (RIGHT + "CAPABILITIES = {'logical_to_physical': {'pages': (64,)}}", "page_sizes"),
        (RIGHT + "CAPABILITIES = {'logical_to_physical': {'page_sizes': (0,)}}", "page_sizes"),
        (RIGHT + "CAPABILITIES = {'logical_to_physical': {'page_sizes': 64}}", "a tuple"),
        (RIGHT + "CAPABILITIES = {'logical_to_physical': {'devices': ['tpu']}}", "tpu"),
        (RIGHT + "CAPABILITIES = {'logical_to_physical': {'dtypes': ['bf16']}}", "bf16"),
        (RIGHT + "CAPABILITIES = {'rerange': {}}", "CAPABILITIES"),
        (RIGHT + "CAPABILITIES = {'reranges': {}}", "Did you mean rerange"),
        (RIGHT + "CAPABILITIES = [1]", "a mapping"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(kernels: Write, source: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(said)):
        load_target(str(kernels(source)))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_file.py", "a file, a module or an entry point"),
        ("no_such_module", "No module named"),
        ("properties.kernels.references:rerang", "Did you mean rerange"),
        ("properties.kernels.references:", "target"),
        ("properties.kernels.adversaries.cheats:zeros", "one of "),
        ("torch:float32", "a module or a function"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(said)):
        load_target(target)


def test_functions_are_operations_by_name_by_declaration_or_by_option(kernels: Write) -> None:
    file = kernels(
        RIGHT
        + """
from refmodel.ops.declare import kernel

@kernel("owner_mask", page_sizes=(64,))
def who_owns(slots, rank, world_size, page_size, *, block=128): ...

def other(buffers, prefixes, tokens, world_size, page_size, out=None): ...

def reranges(): ...

CAPABILITIES = {"owner_mask": {"deterministic": True}}
"""
    )
    target = load_target(str(file))
    assert set(target.candidates) == {"logical_to_physical", "owner_mask"}
    mask = target.candidates["owner_mask"].capabilities
    assert (mask.page_sizes, mask.deterministic) == ((64,), True)
    assert target.near_misses == (("reranges", "rerange"),)
    assert list(load_target(f"{file}:who_owns").candidates) == ["owner_mask"]
    other = load_target(f"{file}:other", "rerange").candidates["rerange"]
    assert other.takes_out
    assert not other.needs_out


def test_a_module_is_found_from_where_one_is(kernels: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kernels(RIGHT).rename(kernels(RIGHT).with_name("kernels_of_mine.py"))
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert list(load_target("kernels_of_mine").candidates) == ["logical_to_physical"]
