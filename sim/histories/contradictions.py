"""What types cannot say about a history: settings of no server, operations on requests that do not exist."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from refmodel.errors import CpkvError, InvalidInput
from refmodel.laws import law
from refmodel.layout.geometry import ceil_div
from refmodel.storage.reuse import ViewPath
from sim.histories.history import OPERATIONS, History, Step, Submit
from sim.histories.settings import key_of, server_settings

Contradiction = tuple[str, str, object]  # path, what was expected there, what came


def contradictions(history: History) -> Iterator[Contradiction]:
    """(path, expected, received) of what types cannot say, those of settings first."""
    for i, law_id in enumerate(history.laws):
        try:
            law(law_id)
        except CpkvError as error:
            yield f"laws[{i}]", error.expected, law_id
    yield from _of_the_settings(history)
    submitted: set[str] = set()
    for i, step in enumerate(history.history):
        for path, expected, received in _of_a_step(step, history, submitted):
            yield f"history[{i}]{path and '.'}{path}", expected, received
        if step.submit is not None and not step.refused:
            submitted.add(step.submit.request)


def _of_the_settings(history: History) -> Iterator[Contradiction]:
    """What a server would refuse at start-up (X1), unless that is the point; and what fits no server."""
    if history.refused_at_start is None:
        try:
            server_settings(history)
        except InvalidInput as error:
            yield key_of(error), error.expected, error.received
    if history.storage and not history.host_pages_per_lane:
        yield "storage", "false without host_pages_per_lane: files go by way of the host", history.storage
    if history.bigram and not history.draft_layers:
        yield "bigram", "false without draft_layers, whose rows it is about", history.bigram
    if history.bigram and history.host_pages_per_lane:
        yield "bigram", "false with a host cache, whose pages have plain keys", history.bigram
    if history.view is ViewPath.NONE and not history.model:
        yield "view", "full, current or partial without model", history.view.value
    if history.model and history.draft_layers:
        yield "draft_layers", "0 with model: it has no draft model", history.draft_layers


def _of_a_step(step: Step, history: History, submitted: set[str]) -> Iterator[Contradiction]:
    given = [name for name in OPERATIONS if getattr(step, name) is not None]
    if len(given) != 1:
        yield "", f"one operation of {', '.join(OPERATIONS)}", " and ".join(given) or "none"
        return
    if not step.refused:  # else it may be as wrong as it likes
        yield from _of_the_names(step, submitted)
        if step.submit is not None:
            yield from _of_a_submit(step.submit, submitted)
            yield from _of_the_blocks(step.submit, history)
    known = submitted | ({step.submit.request} if step.submit else set())
    for name in step.expect.valid:
        if name not in known:
            yield "expect.valid", "requests that an earlier step submitted", name
    if step.expect.free is not None and len(step.expect.free) != history.world_size:
        yield "expect.free", f"{history.world_size} numbers, one a lane", step.expect.free


def _of_the_names(step: Step, submitted: set[str]) -> Iterator[Contradiction]:
    for path, name in _names(step.name, getattr(step, step.name)):
        if name not in submitted:
            yield path, "a request that an earlier step submitted", name


def _names(path: str, value: object) -> Iterator[tuple[str, str]]:
    """(path, name) of every request that an operation is about, but for one that it submits."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        yield from ((f"{path}[{i}]", name) for i, name in enumerate(value))
    elif isinstance(value, msgspec.Struct):
        key = "like" if isinstance(value, Submit) else "request"
        if (name := getattr(value, key, None)) is not None:
            yield f"{path}.{key}", name


def _of_a_submit(submit: Submit, submitted: set[str]) -> Iterator[Contradiction]:
    if submit.request in submitted:
        yield "submit.request", "a new name", f"{submit.request}, as an earlier step has it"
    if submit.shared and submit.like is None:
        yield "submit.shared", "no such key without like", submit.shared
    if submit.shared > submit.tokens:
        yield "submit.shared", f"at most {submit.tokens}, the prompt", submit.shared


def _of_the_blocks(submit: Submit, history: History) -> Iterator[Contradiction]:
    if submit.prefetch and not history.storage:
        yield "submit.prefetch", "false without storage", submit.prefetch
    if submit.blocks is None:
        if submit.block_tokens is not None:
            yield "submit.block_tokens", "no such key without blocks", submit.block_tokens
        return
    if submit.like is not None:
        yield "submit.like", "no such key with blocks, which say all tokens", submit.like
    needed = ceil_div(submit.tokens, submit.tokens_a_block)
    if len(submit.blocks) != needed:
        of_so_many = f"{needed} for {submit.tokens} tokens, one for {submit.tokens_a_block}"
        yield "submit.blocks", of_so_many, len(submit.blocks)
