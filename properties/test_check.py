"""The kit tells right kernels from wrong ones, says why, and survives both."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.command_line import PLAIN as PLAIN_TERMINAL
from properties.command_line import cpkv, refused
from properties.kernels import faults
from properties.kernels.adversaries import ADVERSARIES, cheats
from properties.kernels.adversaries.adversary import Adversary, adversaries_of
from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from properties.kernels.check import Check, Plan
from properties.kernels.guarded import guarded, stain
from properties.kernels.handling import PLAIN, Handling, Views, all_handlings, few_handlings
from properties.kernels.paste import code_of
from properties.kernels.selection import size_of
from properties.kernels.trial import Trial
from properties.kernels.tried import Search, Tried
from properties.kernels.verdicts import Verdict
from properties.kernels.watched import Children
from refmodel.errors import InvalidInput
from refmodel.ops.catalogue import OPS
from refmodel.ops.declare import Capabilities, declaration_of, kernel
from sim.kernels.candidate import Candidate
from sim.kernels.target import load_target

CHEATS = tuple(adversaries_of(cheats))
DEADLY = {faults.CRASH, faults.HANG}
ALONE = [op for op in OPS if not OPS[op].collective]

RIGHT = """
from refmodel.ops.layout import LOGICAL_TO_PHYSICAL, OWNER_MASK, RERANGE

def logical_to_physical(slots, rank, world_size, page_size):
    return LOGICAL_TO_PHYSICAL.reference(slots, rank, world_size, page_size)[0]
"""

WRONG = """
def logical_to_physical(slots, rank, world_size, page_size):
    return slots // world_size
"""

Write = Callable[[str], Path]


def named(adversary: Adversary) -> str:
    return adversary.name


def candidate_of(function: Callable[..., Any], op: str) -> Candidate:
    said = declaration_of(function)
    return Candidate(OPS[op], function, said.capabilities if said else Capabilities())


def tried(candidate: Candidate, examples: int = 30) -> Tried:
    """In this process: quick, as long as the candidate lets it live."""
    search = Search(candidate, CASES[candidate.op.name], Trial(candidate).once, examples, seed=0)
    return search.run()


def verdict_of(target: str, op: str, **plan: Any) -> Verdict:
    """In a process of its own, as the command does it."""
    with Children(target, op, plan.get("limit", 60.0)) as children:
        return Check(Plan(target, (op,), **plan), children).verdict(op)


@pytest.fixture
def kernels(tmp_path: Path) -> Write:
    """``kernels(source)``: a file of kernels."""

    def write(source: str) -> Path:
        file = tmp_path / "mine.py"
        file.write_text(source)
        return file

    return write


# -- right kernels pass, wrong ones fail for the right reason ----------------------------------------------


@pytest.mark.parametrize("op", ALONE)
def test_a_right_kernel_passes(op: str) -> None:
    result = tried(candidate_of(OPS[op].reference, op), examples=10)
    assert result.counterexample is None
    assert result.cases > 5


@pytest.mark.parametrize(
    "adversary", [one for one in ADVERSARIES if one.op in ALONE and not one.huge], ids=named
)
def test_a_wrong_kernel_fails_for_its_reason(adversary: Adversary) -> None:
    found = tried(candidate_of(adversary.function, adversary.op)).counterexample
    assert found is not None
    assert found.finding.law == (adversary.law or adversary.kind)


@pytest.mark.parametrize("cheat", [one for one in CHEATS if one.kind not in DEADLY], ids=named)
def test_a_cheat_fails_for_its_reason(cheat: Adversary) -> None:
    found = tried(candidate_of(cheat.function, cheat.op)).counterexample
    assert found is not None
    assert found.finding.law == (cheat.law or cheat.kind)


def test_every_rule_of_the_kit_has_a_cheat_that_breaks_it() -> None:
    on_a_gpu = {faults.DEVICE}
    of_a_list = {faults.UNEXPECTED_PASS}
    assert {cheat.kind for cheat in CHEATS} - {""} == set(faults.STATEMENTS) - on_a_gpu - of_a_list


@pytest.mark.nccl
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("adversary", [one for one in ADVERSARIES if one.huge], ids=named)
def test_offsets_of_32_bits_are_caught_by_a_huge_case(adversary: Adversary) -> None:
    huge = CASES[adversary.op].huge()
    assert huge is not None
    right, wrong = (candidate_of(f, adversary.op) for f in (OPS[adversary.op].reference, adversary.function))
    assert Trial(right, "cuda").alone(huge) is None
    finding = Trial(wrong, "cuda").alone(huge)
    assert finding is not None
    assert finding.law == adversary.law


# -- a process of its own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cheat", [one for one in CHEATS if one.kind in DEADLY], ids=named)
def test_a_crash_and_a_hang_are_findings(cheat: Adversary) -> None:
    verdict = verdict_of(f"{cheats.__name__}:{cheat.name}", cheat.op, limit=1.5)
    assert verdict.failure is not None
    assert verdict.failure.kind == cheat.kind
    assert verdict.failure.steady
    if cheat.name == "segfaults":
        assert 100 < verdict.failure.case["slots"] < 200  # 5,000 in the corner that crashes first
        assert "SIGSEGV" in verdict.failure.received
        assert "in segfaults" in verdict.failure.received
    if cheat.name == "hangs":
        assert verdict.failure.case["slots"] == 1
        assert "in hangs" in verdict.failure.received


def test_one_that_dies_leaves_the_others(kernels: Write, tmp_path: Path) -> None:
    file = kernels(
        RIGHT
        + """
import os

def rerange(buffers, prefixes, tokens, world_size, page_size):
    print("so far so good", flush=True)
    os.abort()

def owner_mask(slots, rank, world_size, page_size):
    while True:
        pass
"""
    )
    report = tmp_path / "check.json"
    result = cpkv("check", file, "--limit", 1, "--examples", 5, "--json", report)
    assert result.exit_code == 1
    found = {one["op"]: one for one in json.loads(report.read_text())["verdicts"]}
    assert found["logical_to_physical"]["verdict"] == "pass"
    assert found["rerange"]["failure"]["kind"] == "crash"
    assert "SIGABRT" in found["rerange"]["failure"]["received"]
    assert "so far so good" in found["rerange"]["failure"]["received"]
    assert found["owner_mask"]["failure"]["kind"] == "hang"


# -- how tensors are handed over ---------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]),
    views=st.sampled_from(Views),
    poison=st.sampled_from([0, 1]),
    data=st.data(),
)
def test_a_byte_written_around_the_elements_shows_and_one_in_them_does_not(
    shape: tuple[int, ...], dtype: torch.dtype, views: Views, poison: int, data: st.DataObject
) -> None:
    place = guarded(shape, dtype, views, poison=poison)
    assert tuple(place.view.shape) == shape
    place.fill(torch.ones(shape, dtype=dtype))
    assert not place.changed
    assert not place.strays()
    before = place.buffer.clone()
    place.view.zero_()
    assert not place.strays()
    assert place.changed == bool(place.view.numel())
    theirs = (place.buffer != before).nonzero()[:, 0].tolist()
    byte = data.draw(st.integers(0, place.buffer.numel() - 1).filter(lambda n: n not in theirs))
    inside = 0 <= byte - place.first < (max(theirs) if theirs else 0) and dtype not in (
        torch.uint8,
        torch.bool,
    )
    place.buffer[byte] += 1
    if not inside:  # an element's other bytes are the element's
        assert place.strays()


@pytest.mark.parametrize("op", ALONE)
def test_few_ways_of_handing_over_have_each_pair_of_two(op: str) -> None:
    candidate = candidate_of(OPS[op].reference, op)
    every, few = list(all_handlings(candidate)), few_handlings(candidate)
    assert few[0] == every[0] == PLAIN
    assert set(few) <= set(every)
    for way in every:
        for one in ("index", "views", "finite"):
            for other in ("index", "views", "finite"):
                wanted = getattr(way, one), getattr(way, other)
                assert any((getattr(each, one), getattr(each, other)) == wanted for each in few)


def test_poison_is_never_a_right_index_and_differs_between_runs() -> None:
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        first, second = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)
        stain(first, 0)
        stain(second, 1)
        assert not torch.equal(first, second)
        if dtype in (torch.int32, torch.int64):
            assert min(int(first), int(second)) > 2**28


# -- what is declared is tried, and nothing beyond ---------------------------------------------------------


def test_one_that_is_right_for_contiguous_tensors_passes_if_it_says_so() -> None:
    flat = cheats.flat_memory
    assert tried(candidate_of(flat, "rerange")).counterexample is not None
    assert tried(Candidate(OPS["rerange"], flat, Capabilities(contiguous=True))).counterexample is None


def test_one_that_knows_one_index_type_passes_if_it_says_so() -> None:
    wide = cheats.always_int64
    capabilities = Capabilities(index_dtypes=("int64",))
    assert tried(Candidate(OPS["logical_to_physical"], wide, capabilities)).counterexample is None


def test_only_declared_page_sizes_are_tried_and_each_of_them() -> None:
    seen: set[int] = set()

    @kernel("logical_to_physical", page_sizes=(64, 48))
    def noting(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
        seen.add(page_size)
        return OPS["logical_to_physical"].reference(slots, rank, world_size, page_size)[0]

    result = tried(candidate_of(noting, "logical_to_physical"))
    assert result.counterexample is None
    assert seen == {64, 48}
    assert not result.untried


def test_nothing_is_said_where_no_case_is_within_what_is_declared(kernels: Write) -> None:
    file = kernels(RIGHT.replace("def ", "CAPABILITIES = {'rerange': {'dtypes': ['complex64']}}\ndef ", 1)
                   + "\ndef rerange(buffers, prefixes, tokens, world_size, page_size): ...\n")  # fmt: skip
    verdict = verdict_of(str(file), "rerange")
    assert (verdict.verdict, verdict.why) == ("unknown", "no case within the declared capabilities")
    assert verdict.declared == {"dtypes": "complex64"}


def test_a_missing_device_is_named(kernels: Write) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    file = kernels(f"CAPABILITIES = {{'logical_to_physical': {{'devices': ('cuda',)}}}}\n{RIGHT}")
    verdict = verdict_of(str(file), "logical_to_physical")
    assert (verdict.verdict, verdict.why) == ("unknown", "no CUDA GPU")
    on_cpu = verdict_of(str(file), "logical_to_physical", device="cpu")
    assert (on_cpu.verdict, on_cpu.why) == ("unknown", "declared for cuda only")
    assert cpkv("check", file).exit_code == 2


# -- what a failure says -----------------------------------------------------------------------------------


def test_a_failure_is_small_and_its_code_and_replay_show_it(kernels: Write, tmp_path: Path) -> None:
    file, report = kernels(WRONG), tmp_path / "check.json"
    result = cpkv("check", file, "--json", report)
    assert result.exit_code == 1
    (verdict,) = json.loads(report.read_text())["verdicts"]
    failure = verdict["failure"]
    assert failure["kind"] == "O2"
    assert f"O2 broke: {failure['statement']}" in result.output
    assert failure["case"]["slots"] == 1
    assert failure["code"] in result.output
    printed = subprocess.run(
        [sys.executable, "-c", failure["code"]], capture_output=True, text=True, check=True
    ).stdout
    received, expected = printed.splitlines()
    assert failure["received"] in received
    assert failure["expected"] in expected
    assert f"  replay        {failure['replay']}" in result.output.splitlines()
    again = cpkv(*shlex.split(failure["replay"])[1:])
    assert again.exit_code == 1
    assert "O2 broke" in again.output


def test_a_replay_tries_every_way_of_handing_over(kernels: Write) -> None:
    file = kernels(RIGHT.replace("[0]", "[0].long()"))  # right for int64 alone
    result = cpkv("check", file)
    assert "handed over   int32 indices" in result.output
    (replay,) = re.findall(r"replay +(cpkv .*)", result.output)
    assert "dtype: " in cpkv(*shlex.split(replay)[1:]).output


@pytest.mark.parametrize("op", ALONE)
def test_the_code_of_any_case_runs(op: str) -> None:
    case = min(CASES[op].corners(), key=size_of)
    for way in (PLAIN, Handling(views=Views.STRIDED)):
        printed: list[tuple[object, ...]] = []
        code = code_of(case, way, "properties.kernels.references")
        exec(compile(code, op, "exec"), {"print": lambda *values, into=printed: into.append(values)})
        assert [values[0] for values in printed] == ["received", "expected"]


def test_a_replay_shows_what_the_kernel_prints(kernels: Write) -> None:
    file = kernels(RIGHT.replace("    return", "    print('rank', rank)\n    return"))
    case = '{"world":2,"page":4,"rank":1,"slots":3}'
    result = cpkv("check", file, "--op", "logical_to_physical", "--case", case)
    assert result.exit_code == 0
    assert "rank 1" in result.output


# -- known failures ----------------------------------------------------------------------------------------


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


# -- targets -----------------------------------------------------------------------------------------------


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


# -- the command -------------------------------------------------------------------------------------------


def test_a_right_target_holds_with_exit_code_0(tmp_path: Path) -> None:
    report = tmp_path / "check.json"
    ops = ("--op", "rerange", "--op", "lse_merge")
    result = cpkv("check", "properties.kernels.references", *ops, "--examples", 5, "--json", report)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("check held: 2 pass; ")
    found = json.loads(report.read_text())
    assert (found["schema"], found["target"], found["exit_code"]) == (1, "properties.kernels.references", 0)
    assert {one["op"]: one["verdict"] for one in found["verdicts"]} == {
        "rerange": "pass",
        "lse_merge": "pass",
    }
    assert all(one["cases"] and one["attempts"] for one in found["verdicts"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--op", "rerang"], "Did you mean rerange"),
        (["--op", "rerange"], "logical_to_physical"),
        (["--device", "tpu"], "--device"),
        (["--world", "mpi:2"], "mpi"),
        (["--case", "{}"], "--op NAME"),
        (["--op", "logical_to_physical", "--case", "{}"], "world"),
        (["--op", "logical_to_physical", "--case", '{"world": 1'], "--case"),
        (["--op", "logical_to_physical", "--case", '{"wrld": 1}'], "--case"),
        (["--json", "no/such/folder/check.json"], "--json"),
        (["--known", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense_are_refused(kernels: Write, options: list[str], said: str) -> None:
    output = refused("check", kernels(RIGHT), *options)
    assert said in output
    assert "Traceback" not in output


# -- under pytest ------------------------------------------------------------------------------------------


def _pytest(folder: Path, *options: object) -> str:
    """In a process of its own, from a folder that knows nothing of this repository."""
    env = {name: value for name, value in os.environ.items() if name not in PLAIN_TERMINAL}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "properties.kernels",
        "-p",
        "no:cacheprovider",
        "-rA",
    ]
    done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, env=env, cwd=folder)
    return done.stdout + done.stderr


def test_pytest_has_a_test_an_operation(kernels: Write, tmp_path: Path) -> None:
    file = kernels(
        RIGHT + "\ndef rerange(buffers, prefixes, tokens, world_size, page_size): return buffers[:0]\n"
    )
    output = _pytest(tmp_path, "--cpkv-kernels", file, "--cpkv-examples", 5)
    assert re.search(r"PASSED .*\[logical_to_physical\]", output)
    assert re.search(r"FAILED .*\[rerange\]", output)
    assert "shape: Results have the shapes" in output
    assert "replay        cpkv check" in output
    assert f"1 failed, 1 passed, {len(OPS) - 2} skipped" in output


def test_pytest_without_a_target_tests_nothing_and_refuses_a_bad_one(tmp_path: Path) -> None:
    assert "1 skipped" in _pytest(tmp_path)
    output = _pytest(tmp_path, "--cpkv-kernels", "no_such_module")
    assert "No module named 'no_such_module'" in output
    assert "passed" not in output


# -- a case says it all ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(CASES.values()), ids=lambda kind: kind.op.name)
def test_a_case_is_small_before_it_is_large(kind: type[Case]) -> None:
    sizes = [size_of(case)[0] for case in kind.corners()]
    assert min(sizes) == min(sizes[:3])


def test_checking_one_operation_takes_seconds() -> None:
    start = time.process_time()
    tried(candidate_of(OPS["rerange"].reference, "rerange"), examples=40)
    assert time.process_time() - start < 10
