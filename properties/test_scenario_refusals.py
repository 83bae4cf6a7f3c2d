"""A file that makes no sense is refused, and says where."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from properties.one_change import with_one_change
from properties.smallest_scenario import SMALLEST, expecting
from refmodel.errors import InvalidInput
from sim.cases.library import load_scenario, parse_scenario
from sim.gate.runs import check_scenario

changed = partial(with_one_change, SMALLEST)


def second_request(extend: str) -> str:
    return f"{SMALLEST}      - {extend}\n"


def second_step(extend: str) -> str:
    return f"{SMALLEST}  - extend: [{extend}]\n"


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
