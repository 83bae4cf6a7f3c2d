"""The catalogue holds and goes everywhere; a file that makes no sense is refused, and says where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from properties import reached
from refmodel.errors import InvalidInput
from refmodel.laws import LAWS
from refmodel.layout.ownership import current_slots
from refmodel.storage.reuse import ViewPath
from refmodel.storage.write import write_verdict
from sim.cases.build import build_case
from sim.cases.library import (
    AnyScenario,
    catalogue,
    find_scenarios,
    load_scenario,
    parse_scenario,
    theme_of,
)
from sim.cases.scenario import Scenario
from sim.gate.marks import MARKS, marks_of
from sim.gate.runs import Outcome, check_scenario, run_scenario
from sim.histories.history import History
from sim.world import World

CATALOGUE = tuple(catalogue())
OF_FORWARDS = tuple(scenario for scenario in CATALOGUE if isinstance(scenario, Scenario))
HISTORIES = tuple(scenario for scenario in CATALOGUE if isinstance(scenario, History))
ON_GLOO = tuple(scenario for scenario in CATALOGUE if "gloo" in scenario.worlds)

# Faults that real systems had and that a run can show. Not among them: attn-04, whose error stays within the
# budget on a model of this size, and topk-04, which builds what nobody reads.
INCIDENTS = (
    *(f"split-{number:02}" for number in range(1, 15)),
    *(f"own-{number:02}" for number in range(1, 7)),
    *(f"view-{number:02}" for number in range(1, 9)),
    *(f"attn-{number:02}" for number in range(1, 4)),
    *(f"topk-{number:02}" for number in range(1, 4)),
    *(f"fmt-{number:02}" for number in range(1, 4)),
    *(f"draft-{number:02}" for number in range(1, 4)),
    *(f"radix-{number:02}" for number in range(1, 6)),
    *(f"host-{number:02}" for number in range(1, 8)),
    *(f"pd-{number:02}" for number in range(1, 8)),
    *(f"adm-{number:02}" for number in range(1, 4)),
)


def name(scenario: AnyScenario) -> str:
    return scenario.file.removesuffix(".yaml")


def require_held(outcome: Outcome) -> None:
    findings = "\n  ".join(map(str, outcome.findings))
    assert outcome.held, f"{outcome.scenario.title}\n  {findings}\n  replay: {outcome.replay}"


# -- the catalogue runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", CATALOGUE, ids=name)
def test_every_scenario_holds_on_lockstep(scenario: AnyScenario) -> None:
    with World.lockstep(scenario.world_size) as world:
        outcome = run_scenario(scenario, world)
    reached.marks.update(outcome.marks)
    require_held(outcome)


@pytest.mark.gloo
@pytest.mark.parametrize("scenario", ON_GLOO, ids=name)
def test_gloo_gives_the_digest_of_lockstep(scenario: AnyScenario, gloo_world: Callable[[int], World]) -> None:
    outcome = run_scenario(scenario, gloo_world(scenario.world_size))
    require_held(outcome)
    with World.lockstep(scenario.world_size) as lockstep:
        assert outcome.digest == run_scenario(scenario, lockstep).digest


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_schedule_of_ranks_changes_nothing(seed: int) -> None:
    (scenario,) = find_scenarios("batch/padding-with-gathered-write")
    with World.lockstep(2) as first, World.lockstep(2, seed=seed) as other:
        assert run_scenario(scenario, other).digest == run_scenario(scenario, first).digest


# -- the catalogue goes everywhere -------------------------------------------------------------------------


def test_the_catalogue_is_large_and_nothing_in_it_is_a_copy() -> None:
    assert len(OF_FORWARDS) >= 190
    assert len(HISTORIES) >= 60
    twice = [title for title, times in Counter(s.title for s in CATALOGUE).items() if times > 1]
    assert not twice


def test_every_world_size_and_page_size_occurs() -> None:
    assert {scenario.world_size for scenario in CATALOGUE} >= {1, 2, 3, 4, 5, 7, 8}
    assert {scenario.page_size for scenario in CATALOGUE} >= {1, 2, 3, 16, 64}


@pytest.mark.parametrize("model", [False, True], ids=["identities", "model"])
def test_every_format_is_viewed_in_every_way(model: bool) -> None:
    """As far as there is such a thing: no model computes tags, and who has none does not attend to shards."""
    scenarios = [scenario for scenario in OF_FORWARDS if ("attention" in scenario.checks) == model]
    formats = {"f64", "f32", "bf16", "fp8"}
    assert {scenario.format for scenario in scenarios} == (formats if model else formats | {"tag"})
    paths = set(ViewPath)
    assert {scenario.view for scenario in scenarios} == (paths if model else paths - {ViewPath.NONE})


def test_every_law_is_named_by_a_scenario() -> None:
    assert {law for scenario in CATALOGUE for law in scenario.laws} == set(LAWS)


def test_every_mark_is_reached() -> None:
    seen: set[str] = set()
    for scenario in OF_FORWARDS:
        case = build_case(scenario)
        for forward in case.forwards:
            plan = forward.plan(case.grid, case.split)
            seen.update(marks_of(plan, write_verdict(plan, current_slots(plan, forward.tables))))
    assert seen == set(MARKS)


def test_every_incident_has_a_scenario_named_after_it() -> None:
    incidents = [scenario for scenario in CATALOGUE if scenario.incident]
    assert {scenario.incident for scenario in incidents} >= set(INCIDENTS)
    for scenario in incidents:
        assert theme_of(scenario) in {"incidents", "transfer"}
        assert Path(scenario.file).name.startswith(f"{scenario.incident}-"), scenario.file
        assert scenario.source, scenario.file


def test_gloo_runs_a_share_of_small_worlds() -> None:
    assert len(ON_GLOO) >= 25
    assert {scenario.world_size for scenario in ON_GLOO} == {2, 4}
    assert {"reuse", "model", "draft"} <= {theme_of(scenario) for scenario in ON_GLOO}


# -- finding scenarios -------------------------------------------------------------------------------------


def test_scenarios_are_found_by_theme_name_and_path(tmp_path: Path) -> None:
    (one,) = find_scenarios("worked/tokens-100")
    assert find_scenarios("worked/tokens-100.yaml") == [one]
    assert one in find_scenarios("worked")
    mine = tmp_path / "deeper" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text(SMALLEST, encoding="utf-8")
    assert [s.file for s in find_scenarios(str(tmp_path))] == [str(mine)]
    assert find_scenarios(str(mine)) == find_scenarios(str(tmp_path))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="got wrked/tokens-100"):
        find_scenarios("wrked/tokens-100")


# -- what makes no sense is refused, by name ---------------------------------------------------------------

SMALLEST = """\
title: Five tokens
why: The smallest file there is.
laws: [S1]
world_size: 2
page_size: 4
steps:
  - extend:
      - {request: a, tokens: 5}
"""


def changed(old: str, new: str) -> str:
    """The smallest file with one thing changed."""
    assert SMALLEST.count(old) == 1
    return SMALLEST.replace(old, new)


def second_request(extend: str) -> str:
    return f"{SMALLEST}      - {extend}\n"


def second_step(extend: str) -> str:
    return f"{SMALLEST}  - extend: [{extend}]\n"


def expecting(number: str, **settings: str) -> str:
    lines = "".join(f"{key}: {value}\n" for key, value in settings.items())
    return f"{SMALLEST}    expect: {{{number}}}\n{lines}"


TOKENS = "steps[0].extend[0].tokens"

REFUSED = {
    "unknown key": (changed("tokens: 5", "tokens: 5, prefx: 3"), "steps[0].extend[0]", "known keys", "prefx"),
    "unknown key on top": (SMALLEST + "cp_size: 2\n", "the whole file", "known keys", "cp_size"),
    "missing key": (changed("page_size: 4\n", ""), "the whole file", "page_size", "nothing"),
    "key that is no text": (SMALLEST + "4: 5\n", "the whole file", "keys that are text", "4: 5"),
    "empty file": ("", "the whole file", "object", "None"),
    "wrong type": (changed("tokens: 5", "tokens: five"), TOKENS, "int", "'five'"),
    "truth is no number": (changed("tokens: 5", "tokens: true"), TOKENS, "int", "True"),
    "no ranks": (changed("world_size: 2", "world_size: 0"), "world_size", ">= 1", "0"),
    "no slots": (changed("page_size: 4", "page_size: 0"), "page_size", ">= 1", "0"),
    "no tokens": (changed("tokens: 5", "tokens: 0"), TOKENS, ">= 1", "0"),
    "negative tokens": (changed("tokens: 5", "tokens: -3"), TOKENS, ">= 1", "-3"),
    "too many tokens": (changed("tokens: 5", "tokens: 99999999999999999999"), TOKENS, "<= 8388608", "9999"),
    "negative prefix": (
        changed("tokens: 5", "tokens: 5, prefix: -1"),
        "steps[0].extend[0].prefix",
        ">= 0",
        "-1",
    ),
    "negative padding": (SMALLEST + "    padding: -1\n", "steps[0].padding", ">= 0", "-1"),
    "no steps": (SMALLEST.partition("  - extend")[0].replace("steps:", "steps: []"), "steps", ">= 1", "[]"),
    "no laws": (changed("[S1]", "[]"), "laws", ">= 1", "[]"),
    "unknown law": (changed("[S1]", "[S1, S99]"), "laws[1]", "S9", "S99"),
    "unknown split": (SMALLEST + "split: zigzag\n", "split", "page_aligned", "zigzag"),
    "unknown write": (expecting("write: fast"), "steps[0].expect.write", "direct, gathered", "fast"),
    "unknown world": (SMALLEST + "worlds: [mpi]\n", "worlds[0]", "lockstep, gloo", "mpi"),
    "attention of tags": (
        SMALLEST + "format: tag\nchecks: [attention]\n",
        "format",
        "f64",
        "tag",
    ),
    "no view of identities": (SMALLEST + "view: none\n", "view", "without the attention check", "none"),
    "unknown view": (SMALLEST + "view: half\n", "view", "full, current, partial, none", "half"),
    "transform of identities": (SMALLEST + "transform: ragged\n", "transform", "no model runs", "RAGGED"),
    "unknown transform": (SMALLEST + "transform: flat\n", "transform", "paged, ragged", "flat"),
    "ids of identities": (SMALLEST + "ids: zero\n", "ids", "no model runs", "zero"),
    "top-k of identities": (SMALLEST + "top_k: 3\n", "top_k", "no model runs", "3"),
    "top-k of nothing": (SMALLEST + "top_k: 0\n", "top_k", ">= 1", "0"),
    "unknown precision": (SMALLEST + "format: fp4\n", "format", "tag, f64, f32, bf16, fp8", "fp4"),
    "prefetch by number": (SMALLEST + "prefetch: 1\n", "prefetch", "bool", "1"),
    "draft without its check": (
        SMALLEST + "    draft: missing\n",
        "steps[0].draft",
        "without the draft check",
        "missing",
    ),
    "stale from the start": (
        SMALLEST + "    draft: stale\nchecks: [identity, draft]\n",
        "steps[0].draft",
        "no step came before",
        "stale",
    ),
    "bytes of an identity": (
        SMALLEST + "offsets: [{cache: kv, format: tag, slot: 0, fields: [0]}]\n",
        "offsets[0].format",
        "f64, f32, bf16, fp8",
        "tag",
    ),
    "rotation of a whole turn": (
        changed("tokens: 5", "tokens: 5, rotation: 2"),
        "steps[0].extend[0].rotation",
        "0 … 1",
        "2",
    ),
    "rotation of a round": (
        changed("tokens: 5", "tokens: 5, rotation: 1") + "split: round_robin\n",
        "steps[0].extend[0].rotation",
        "0 with split round_robin",
        "1",
    ),
    "segments of a round": (
        expecting("segments: [[2, 1, 1, 1]]", split="round_robin"),
        "steps[0].expect.segments",
        "no segments",
        "[[2, 1, 1, 1]]",
    ),
    "units of a token-balanced split": (
        expecting("units: [[0, 2]]", split="token_balanced"),
        "steps[0].expect.units",
        "page_aligned",
        "[[0, 2]]",
    ),
    "kv_stop of a batch": (
        second_request("{request: b, tokens: 1}") + "    expect: {kv_stop: [[1, 2], [3, 4]]}\n",
        "steps[0].expect.kv_stop",
        "none in a batch",
        "[[1, 2], [3, 4]]",
    ),
    "a request twice": (
        second_request("{request: a, tokens: 1}"),
        "steps[0].extend[1].request",
        "each request once",
        "a twice",
    ),
    "a prefix that contradicts": (
        second_step("{request: a, tokens: 1, prefix: 4}"),
        "steps[1].extend[0].prefix",
        "5, what earlier steps left",
        "4",
    ),
}


@pytest.mark.parametrize(("text", "path", "expected", "received"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_makes_no_sense_is_refused(text: str, path: str, expected: str, received: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        check_scenario(parse_scenario(text, "mine.yaml"))
    error = refusal.value
    assert (error.where.file, error.where.path) == ("mine.yaml", path)
    assert expected in error.expected
    assert received in error.received
    assert all(part in str(error) for part in ("mine.yaml", path, error.expected, error.received))


@pytest.mark.parametrize(
    ("text", "line", "received"),
    [
        (changed("tokens: 5}", "tokens: 5"), 9, "expected ',' or '}'"),
        (changed("  - extend", "\t- extend"), 7, "cannot start any token"),
        (SMALLEST + "page_size: 8\n", 9, "key 'page_size' twice"),
        (changed("tokens: 5", "tokens: 5, tokens: 6"), 8, "key 'tokens' twice"),
        (SMALLEST + "incident: !secret x\n", 9, "!secret"),
    ],
    ids=["open brace", "tab", "key twice", "key twice in flow", "tag"],
)
def test_invalid_yaml_is_refused_with_its_line(text: str, line: int, received: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_scenario(text, "mine.yaml")
    error = refusal.value
    assert (error.where.file, error.where.line) == ("mine.yaml", line)
    assert received in error.received


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.yaml", tmp_path):
        with pytest.raises(InvalidInput, match=f"file {path}"):
            load_scenario(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="readable YAML"):
        load_scenario(tmp_path / "binary.yaml")


# -- worked numbers are compared ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "law"),
    [
        ("segments: [[3, 2, 0, 0]]", "S1"),
        ("bounds: [[0, 4, 4, 5, 5]]", "S1"),
        ("units: [[0, 3]]", "S2"),
        ("rows: [3, 2]", "S4"),
        ("max_rank_rows: 3", "S4"),
        ("prev_rows: [2, 1]", "S5"),
        ("kv_stop: [[4, 5], [5, 4]]", "S6"),
        ('rank_rows: ["a[0:4]", "a[4:5] |"]', "S1"),
        ("new_pages: [2, 0]", "O6"),
        ("write: gathered", "O5"),
        ("view: partial", "V4"),
    ],
)
def test_a_wrong_number_is_found(number: str, law: str) -> None:
    with World.lockstep(2) as world:
        outcome = run_scenario(parse_scenario(expecting(number), "mine.yaml"), world)
    assert [finding.law for finding in outcome.findings] == [law]
    assert outcome.findings[0].where.step == 1


def test_a_wrong_remap_is_found() -> None:
    text = SMALLEST + "remap: [{slot: 13, owner: 1, local_page: 1, physical: 4}]\n"
    with World.lockstep(2) as world:
        outcome = run_scenario(parse_scenario(text, "mine.yaml"), world)
    assert [finding.law for finding in outcome.findings] == ["O2"]


def test_wrong_offsets_are_found() -> None:
    """Slot 5 is row 1 of page 1, and a page of four is 528 bytes: 4 · 128 of keys, then 4 · 4 of scales."""
    slot = "cache: index, format: fp8, slot: 5, fields:"
    text = f"{SMALLEST}offsets: [{{{slot} [656, 1044]}}, {{{slot} [660, 788]}}]\n"
    with World.lockstep(2) as world:
        outcome = run_scenario(parse_scenario(text, "mine.yaml"), world)
    assert [finding.law for finding in outcome.findings] == ["F2"]
    assert (outcome.findings[0].where.page, outcome.findings[0].where.slot) == (1, 1)
