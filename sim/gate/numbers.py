"""What a model computed on all ranks, judged together: bytes, choices, outputs (laws V1, A2, A5)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from refmodel.errors import Finding, Where
from refmodel.model.attend import index_logits
from refmodel.model.model import Model
from refmodel.model.replicated import Replicated, replicated
from refmodel.model.weights import arrays
from refmodel.oracle import Dense, Sizes, dense_model, relative_error, worst_top_k_fault
from refmodel.precision import FP64_BUDGET, budget
from refmodel.storage.identity import Cache
from sim.cases.arithmetic import Arithmetic
from sim.cases.case import Case, Forward, Turn
from sim.serving.checks import check_shard, differing_rows
from sim.serving.report import RankReport

Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Request:
    """What the ranks made of one request, position by position, so far."""

    chosen: list[torch.Tensor]  # of each layer, [valid, top_k]
    rows: list[dict[Cache, torch.Tensor]]  # of each layer, packed [valid, bytes a token]
    hidden: list[torch.Tensor] = field(default_factory=list)  # of the new tokens of each forward
    cached: int = 0  # tokens that were in cache before the first step

    @property
    def valid(self) -> int:
        return len(self.chosen[0])


def judge_numbers(case: Case, arithmetic: Arithmetic, reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Every view against the rows the ranks computed, then each request against the oracle."""
    widths = {trace.positions.shape[1] for r in reports for output in r.outputs for trace in output.layers}
    if widths != {arithmetic.shape.top_k}:
        yield Finding(
            "A2", "width of top-k", str(arithmetic.shape.top_k), ", ".join(map(str, sorted(widths)))
        )
        return
    model, requests = arithmetic.model(), dict[int, _Request]()
    for index, forward in enumerate(case.forwards):
        for turn in forward.turns:
            if turn.request not in requests:
                requests[turn.request] = _in_cache(arithmetic, turn, reports[0])
        _add_forward(case, forward, index, reports, requests)
        yield from _judge_views(case, forward, index, reports[0], requests)
    if "isolation" in case.checks:
        yield from _judge_shards(case, reports, requests)
    for number, request in requests.items():
        yield from _judge_request(case, arithmetic, model, number, request)


def _in_cache(arithmetic: Arithmetic, turn: Turn, report: RankReport) -> _Request:
    """A request as it was before its first step: its prefix, as the ranks found it."""
    if turn.request not in report.cached:
        nothing = replicated(arithmetic.model(), torch.empty(0, dtype=torch.int64))
        return _Request([t.positions for t in nothing.layers], [dict(t.rows) for t in nothing.layers])
    layers = report.cached[turn.request].layers
    return _Request([t.positions for t in layers], [dict(t.rows) for t in layers], cached=turn.extent.prefix)


def _add_forward(
    case: Case,
    forward: Forward,
    index: int,
    reports: Sequence[RankReport],
    requests: dict[int, _Request],
) -> None:
    """Local rows of all ranks, back in batch order, then to their requests. No page or gather takes part."""
    plan = forward.plan(case.grid, case.split)
    outputs = [report.outputs[index] for report in reports]
    order = torch.argsort(plan.gather_order)
    counts = [extent.tokens for extent in plan.extents]

    def by_request(pieces: Iterator[torch.Tensor]) -> Iterator[tuple[_Request, torch.Tensor]]:
        batch = torch.cat(list(pieces))[order][: plan.real_rows]
        return zip((requests[turn.request] for turn in forward.turns), batch.split(counts), strict=True)

    for layer in range(case.layers):
        for request, chosen in by_request(output.layers[layer].positions for output in outputs):
            request.chosen[layer] = torch.cat([request.chosen[layer], chosen])
        for cache in case.caches:
            for request, rows in by_request(output.layers[layer].rows[cache] for output in outputs):
                request.rows[layer][cache] = torch.cat([request.rows[layer][cache], rows])
    for turn, hidden in zip(forward.turns, outputs[0].hidden.split(counts), strict=True):
        requests[turn.request].hidden.append(hidden)


def _judge_views(
    case: Case, forward: Forward, index: int, report: RankReport, requests: dict[int, _Request]
) -> Iterator[Finding]:
    """V1: rank 0's views are the rows that the ranks computed. (Equal digests say the same of the others.)"""
    for layer, trace in enumerate(report.outputs[index].layers):
        for cache, view in trace.views.items():
            truth = torch.cat([requests[turn.request].rows[layer][cache] for turn in forward.turns])
            wrong = differing_rows(view, truth) if view.shape == truth.shape else [0]
            if len(wrong):
                where = Where(step=forward.step, layer=layer, cache=cache.name.lower())
                yield Finding(
                    "V1",
                    f"{len(wrong)} of {len(truth)} rows of the view, first view row {int(wrong[0])}",
                    "the bytes that its rank computed",
                    f"others, in a view of {len(view)} rows",
                    where,
                )


def _judge_shards(
    case: Case, reports: Sequence[RankReport], requests: dict[int, _Request]
) -> Iterator[Finding]:
    """O3, V1: each rank stores the rows it owns, wherever they were computed, and nothing else."""
    for report in reports:
        for layer, shards in enumerate(report.shards):
            for cache, shard in shards.items():

                def truth(turn: Turn, layer: int = layer, cache: Cache = cache) -> torch.Tensor:
                    return requests[turn.request].rows[layer][cache]

                yield from check_shard(shard, case, layer, cache, truth)


def _judge_request(
    case: Case, arithmetic: Arithmetic, model: Model, number: int, request: _Request
) -> Iterator[Finding]:
    where = Where(request=case.names[number])
    chosen = [choice.numpy() for choice in request.chosen]
    lengths = np.arange(1, request.valid + 1)
    for layer, choice in enumerate(chosen):  # first what needs no logits: the oracle relies on it
        nothing = np.zeros((request.valid, request.valid))
        fault = worst_top_k_fault(choice, nothing, lengths, arithmetic.shape.top_k)
        if fault:
            yield Finding("A2", f"top-k of layer {layer}", "a lawful choice", fault, where)
            return
    ids = arithmetic.tokens(number, request.valid)
    exact = _oracle(arithmetic, ids, chosen)
    slacks, hidden_budget = _budgets(arithmetic, model, ids, exact)
    for layer, (choice, slack) in enumerate(zip(chosen, slacks, strict=True)):
        logits = exact.index_logits[layer]
        fault = worst_top_k_fault(choice, logits, lengths, arithmetic.shape.top_k, slack)
        if fault:
            yield Finding("A2", f"top-k of layer {layer}", "a lawful choice", fault, where)
    actual = torch.cat(request.hidden).to(torch.float64).numpy()
    error = relative_error(actual, exact.hidden[-1][request.cached :])
    if not (math.isfinite(error) and error <= hidden_budget):  # a twin that is NaN allows anything
        yield Finding("A5", "relative error of the output", f"<= {hidden_budget:.3g}", f"{error:.3g}", where)


def _oracle(arithmetic: Arithmetic, ids: torch.Tensor, chosen: Sequence[npt.NDArray[np.int64]]) -> Dense:
    weights, sizes = arrays(arithmetic.weights()), Sizes.of(arithmetic.shape)
    return dense_model(ids.numpy(), weights, sizes, layers=arithmetic.shape.layers, chosen=chosen)


def _budgets(
    arithmetic: Arithmetic, model: Model, ids: torch.Tensor, exact: Dense
) -> tuple[list[float], float]:
    """(how far index logits of each layer may be off, relative error that hidden rows may have)."""
    if arithmetic.precision == "f64":
        return [FP64_BUDGET * _largest(logits) for logits in exact.index_logits], FP64_BUDGET
    twin = replicated(model, ids)
    truth = _oracle(arithmetic, ids, [trace.positions.numpy() for trace in twin.layers])
    eps = torch.finfo(model.weights.norm.dtype).eps
    hidden = relative_error(twin.hidden.to(torch.float64).numpy(), truth.hidden[-1])
    slacks = [
        budget(_logits_error(twin, layer, logits, model), eps=eps * _largest(logits))
        for layer, logits in enumerate(truth.index_logits)
    ]
    return slacks, budget(hidden, eps=eps)


def _largest(logits: Array) -> float:
    return float(np.abs(logits[np.isfinite(logits)]).max())


def _logits_error(twin: Replicated, layer: int, exact: Array, model: Model) -> float:
    """The largest difference of a visible logit."""
    actual = index_logits(twin.projected[layer], twin.layers[layer].rows, twin.ranges, model)
    visible = np.tril(np.ones(exact.shape, bool))
    return float(np.abs(actual.to(torch.float64).numpy() - exact)[visible].max())
