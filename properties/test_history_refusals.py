"""A history that makes no sense is refused, and says where."""

from __future__ import annotations

from functools import partial

import pytest

from properties.one_change import with_one_change
from properties.smallest_history import SMALLEST, parsed, then
from refmodel.errors import InvalidInput
from sim.cases.library import parse_scenario
from sim.gate.runs import run_scenario
from sim.world import World

changed = partial(with_one_change, SMALLEST)

REFUSED = {
    "steps too": (SMALLEST + "steps: []\n", "the whole file", "known keys", "steps"),
    "unknown key": (then("{submit: {request: b, tokns: 5}}"), "history[2].submit", "known keys", "'tokns'"),
    "unknown operation": (then("{preempt: a}"), "history[2]", "known keys", "preempt"),
    "no steps": (
        SMALLEST.partition("  - submit")[0].replace("history:", "history: []"),
        "history",
        ">= 1",
        "",
    ),
    "no operation": (then("{refused: true}"), "history[2]", "one operation", "none"),
    "two operations": (then("{decode: [a], finish: a}"), "history[2]", "one operation", "decode and finish"),
    "no laws": (changed("[L1]", "[]"), "laws", ">= 1", "[]"),
    "unknown law": (changed("[L1]", "[L1, L9]"), "laws[1]", "L8", "L9"),
    "no pages": (changed("pages_per_lane: 3", "pages_per_lane: 0"), "pages_per_lane", ">= 1", "0"),
    "no ranks": (changed("world_size: 2", "world_size: 0"), "world_size", ">= 1", "0"),
    "unknown hit": (SMALLEST + "hit: line\n", "hit", "token, page", "line"),
    "unknown layout": (SMALLEST + "host_layout: best\n", "host_layout", "layer_first, page_first", "best"),
    "round-robin": (SMALLEST + "split: round_robin\n", "split", "token_balanced", "round_robin"),
    "no view": (SMALLEST + "view: none\n", "view", "without model", "none"),
    "draft layers of a model": (
        SMALLEST + "model: true\ndraft_layers: 1\n",
        "draft_layers",
        "0 with model",
        "1",
    ),
    "pages of another size on decode": (
        SMALLEST + "decode_page_size: 8\n",
        "decode_page_size",
        "page_size, 4",
        "8",
    ),
    "pairs of nothing": (SMALLEST + "bigram: true\n", "bigram", "false without draft_layers", "True"),
    "pairs on the host": (
        SMALLEST + "bigram: true\ndraft_layers: 1\nhost_pages_per_lane: 3\n",
        "bigram",
        "false with a host cache",
        "True",
    ),
    "a backend of slices": (SMALLEST + "backend: nixl\n", "backend", "mooncake", "nixl"),
    "refused for nothing that is a setting": (
        SMALLEST + "refused_at_start: layers\n",
        "refused_at_start",
        "one of",
        "layers",
    ),
    "chunk below a page": (SMALLEST + "chunk: 3\n", "chunk", ">= 4", "3"),
    "layout that the engine cannot read": (
        SMALLEST + "host_layout: page_first\ncopy_engine: direct\n",
        "host_layout",
        "layer_first",
        "page_first",
    ),
    "unknown request": (then("{decode: [a, b]}"), "history[2].decode[1]", "earlier step", "b"),
    "request submitted later": (
        then("{finish: b}", "{submit: {request: b, tokens: 1}}"),
        "history[2].finish",
        "earlier step",
        "b",
    ),
    "request that was not let in": (
        then("{submit: {request: b, tokens: 99}, refused: true}", "{forward: [b]}"),
        "history[3].forward[0]",
        "earlier step",
        "b",
    ),
    "sent by nobody": (then("{send: {request: b}}"), "history[2].send.request", "earlier step", "b"),
    "like nobody": (
        then("{submit: {request: b, tokens: 5, like: c, shared: 3}}"),
        "history[2].submit.like",
        "earlier step",
        "c",
    ),
    "a name twice": (
        then("{submit: {request: a, tokens: 5}}"),
        "history[2].submit.request",
        "a new name",
        "a",
    ),
    "blocks and a likeness": (
        then("{submit: {request: b, tokens: 5, like: a, shared: 2, blocks: [1]}}"),
        "history[2].submit.like",
        "no such key with blocks",
        "a",
    ),
    "too few blocks": (
        then("{submit: {request: b, tokens: 5, blocks: [1], block_tokens: 4}}"),
        "history[2].submit.blocks",
        "2 for 5 tokens, one for 4",
        "1",
    ),
    "too many blocks": (
        then("{submit: {request: b, tokens: 512, blocks: [1, 2]}}"),
        "history[2].submit.blocks",
        "1 for 512 tokens, one for 512",
        "2",
    ),
    "a block below 0": (
        then("{submit: {request: b, tokens: 5, blocks: [-1]}}"),
        "history[2].submit.blocks[0]",
        ">= 0",
        "-1",
    ),
    "size of no block": (
        then("{submit: {request: b, tokens: 5, block_tokens: 4}}"),
        "history[2].submit.block_tokens",
        "without blocks",
        "4",
    ),
    "prefetch without storage": (
        then("{submit: {request: b, tokens: 5, prefetch: true}}"),
        "history[2].submit.prefetch",
        "false without storage",
        "True",
    ),
    "shared with nobody": (
        then("{submit: {request: b, tokens: 5, shared: 3}}"),
        "history[2].submit.shared",
        "like",
        "3",
    ),
    "more shared than there is": (
        then("{submit: {request: b, tokens: 3, like: a, shared: 4}}"),
        "history[2].submit.shared",
        "at most 3",
        "4",
    ),
    "expected of nobody": (
        then("{finish: a, expect: {valid: {b: 1}}}"),
        "history[2].expect.valid",
        "sub",
        "b",
    ),
    "too few lanes": (then("{finish: a, expect: {free: [3]}}"), "history[2].expect.free", "2 numbers", "[3]"),
}


@pytest.mark.parametrize(("text", "path", "expected", "received"), REFUSED.values(), ids=REFUSED)
def test_a_history_that_makes_no_sense_is_refused(text: str, path: str, expected: str, received: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_scenario(text, "mine.yaml")
    error = refusal.value
    assert (error.where.file, error.where.path) == ("mine.yaml", path)
    assert expected in error.expected
    assert received in error.received


def test_a_step_that_must_be_refused_may_name_anybody() -> None:
    history = parsed(then("{forward: [b], refused: true}", "{finish: a}", "{finish: a, refused: true}"))
    with World.lockstep(2) as world:
        assert run_scenario(history, world).held
