"""Laws T5, A5: decode computes from the rows that it has what the oracle computes from the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Grid
from refmodel.model.decoding import decode
from refmodel.model.model import Model, build_model
from refmodel.model.replicated import replicated
from refmodel.model.shape import TINY
from refmodel.model.weights import arrays, seeded_weights
from refmodel.oracle import Dense, Sizes, dense_model, relative_error
from refmodel.precision import FP64_BUDGET, budget
from refmodel.storage.formats import PRECISIONS
from refmodel.storage.identity import Cache
from refmodel.storage.shard import Destinations, Shard, empty_shard

SHAPE = replace(TINY, top_k=64)  # more than any drawn request has: no ties to break
MOST = 24  # tokens


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request whose first tokens are in decode's cache."""

    ids: torch.Tensor
    prefix: int  # tokens that have come
    steps: tuple[int, ...]  # new tokens of each step
    slots: torch.Tensor
    page_size: int
    num_pages: int


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Pages in any order, positions in theirs."""
    P = draw(st.sampled_from([1, 3, 4]))
    prefix = draw(st.integers(0, MOST - 6))
    steps = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    tokens = prefix + sum(steps)
    num_pages = -(-tokens // P)
    pages = torch.tensor(draw(st.permutations(range(1, num_pages + 2)))[:num_pages])
    places = torch.arange(tokens)
    ids = draw(st.lists(st.integers(0, SHAPE.vocab - 1), min_size=tokens, max_size=tokens))
    return Job(torch.tensor(ids), prefix, tuple(steps), pages[places // P] * P + places % P, P, num_pages + 2)


def cache_of(job: Job, model: Model) -> list[dict[Cache, Shard]]:
    """What has come: the rows of the prefix, as another computed them; all else is poison."""
    layers = [
        {
            cache: empty_shard(Grid(1, job.page_size), 0, row_format, job.num_pages)
            for cache, row_format in model.formats.items()
        }
        for _ in model.weights.layers
    ]
    if job.prefix:
        traces = replicated(model, job.ids[: job.prefix]).layers
        to = Destinations(torch.arange(job.prefix), job.slots[: job.prefix])
        for shards, trace in zip(layers, traces, strict=True):
            for cache, shard in shards.items():
                shard.write(to, trace.rows[cache])
    return layers


def decoded(job: Job, model: Model, layers: list[dict[Cache, Shard]]) -> torch.Tensor:
    """Hidden rows of all new tokens, step by step."""
    outputs, end = [], job.prefix
    for new in job.steps:
        end += new
        outputs.append(decode(model, job.ids[end - new : end], job.slots[:end], layers))
    return torch.cat(outputs)


def exact(job: Job, model: Model) -> Dense:
    weights = arrays(model.weights)
    return dense_model(job.ids.numpy(), weights, Sizes.of(SHAPE), layers=len(model.weights.layers))


MODELS = {precision: build_model(seeded_weights(SHAPE, seed=0), precision) for precision in PRECISIONS}


@proves("T5", "A5")
@settings(max_examples=60)
@given(jobs())
def test_decode_equals_the_oracle_and_so_does_what_it_writes(job: Job) -> None:
    model = MODELS["f64"]
    layers, truth = cache_of(job, model), exact(job, model)
    untouched = [{cache: shard.pages.clone() for cache, shard in shards.items()} for shards in layers]
    hidden = decoded(job, model, layers)
    assert relative_error(hidden.numpy(), truth.hidden[-1][job.prefix :]) <= FP64_BUDGET
    for layer, shards in enumerate(layers):
        for cache, expected in ((Cache.KV, truth.kv[layer]), (Cache.INDEX, truth.index_keys[layer])):
            shard = shards[cache]
            rows = model.formats[cache].unpack(shard.rows[job.slots]).numpy()
            assert relative_error(rows, expected) <= FP64_BUDGET
            others = torch.ones(shard.num_slots, dtype=torch.bool)
            others[job.slots[job.prefix :]] = False
            before = replace(shard, pages=untouched[layer][cache]).rows
            assert torch.equal(shard.rows[others], before[others])


@proves("T5")
@settings(max_examples=30)
@given(jobs(), st.sampled_from(PRECISIONS))
def test_steps_of_one_token_give_the_rows_of_one_forward(job: Job, precision: str) -> None:
    """In low precision, too, what is stored is what decode reads: sums may differ in their order only."""
    model = MODELS[precision]
    hidden = decoded(job, model, cache_of(job, model)).double()
    whole = replicated(model, job.ids).hidden[job.prefix :].double()
    eps = torch.finfo(model.weights.norm.dtype).eps
    worst = relative_error(whole.numpy(), exact(job, MODELS["f64"]).hidden[-1][job.prefix :])
    assert relative_error(hidden.numpy(), whole.numpy()) <= budget(worst, eps=eps)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    model = MODELS["f64"]
    job = Job(torch.tensor([1, 2, 3]), 2, (1,), torch.tensor([1, 2, 3]), 1, 5)
    layers = cache_of(job, model)
    before = [shard.pages.clone() for shards in layers for shard in shards.values()]
    for ids, shards, message in (
        (job.ids[:0], layers, "tokens to decode: expected 1 … 3, the slots, got 0"),
        (torch.arange(4), layers, "got 4"),
        (job.ids[2:], layers[:1], "shards: expected those of 2 layers, got 1"),
    ):
        with pytest.raises(InvalidInput, match=message):
            decode(model, ids, job.slots, shards)
    after = [shard.pages for shards in layers for shard in shards.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
