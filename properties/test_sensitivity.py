"""Law A5: a budget that no right result exceeds, and every fault of a single token does.

One request of 8,180 tokens in 8,192 slots, on 8 ranks; queries at the edges of segments and pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.telling import MlaShape, TellingInputs, telling_inputs
from refmodel.attention.accumulating import accumulating_type
from refmodel.attention.merge import merge_attended
from refmodel.attention.sparse import Attended, Chosen, sparse_mla
from refmodel.attention.topk import NO_KEY
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Extent, Grid, coverage
from refmodel.layout.plan import plan_batch
from refmodel.layout.split import Split
from refmodel.oracle import Array, causal_mla, relative_error
from refmodel.precision import FP64_BUDGET, budget
from refmodel.storage.baseline import empty_replica
from refmodel.storage.formats import PRECISIONS, TAG, Format, mla_format
from refmodel.storage.identity import Cache, pack

SHAPE, TILE, SM_SCALE = MlaShape(heads=2, latent=512, rope=64), 128, 192**-0.5
EXTENT, GRID = Extent(0, 8180), Grid(8, 64)
BOUNDS = plan_batch([EXTENT], GRID, Split.PAGE_ALIGNED).bounds[0]
# First and last rows of segments of ranks 0, 3 and 7; both sides of page edges; a row inside a page.
SEGMENTS = (0, 3, 7, 8, 12, 15)
ROWS = tuple(
    sorted({*(BOUNDS[i] for i in SEGMENTS), *(BOUNDS[i + 1] - 1 for i in SEGMENTS), 63, 64, 100, 8127, 8128})
)
TYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}

precisions = pytest.mark.parametrize("precision", PRECISIONS)


@dataclass(frozen=True, eq=False)
class Bench:
    """``ROWS`` over one set of inputs, in one precision: queries in it, keys as a cache holds them."""

    inputs: TellingInputs
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        """Of queries and outputs."""
        return TYPES[self.precision]

    @property
    def format(self) -> Format:
        return mla_format(self.precision, latent=SHAPE.latent, rope=SHAPE.rope, tile=TILE)

    @cached_property
    def stored(self) -> torch.Tensor:
        return self.format.unpack(self.format.pack(self.inputs.kv))

    def query(self, row: int) -> torch.Tensor:
        return self.inputs.q[[ROWS.index(row)]].to(self.dtype)

    def part(self, row: int, keys: torch.Tensor, stored: torch.Tensor | None = None) -> Attended:
        """What a row gets from keys [n] of those stored, −1 for none."""
        kv = self.stored if stored is None else stored
        chosen = Chosen(keys[None], len(kv))
        return sparse_mla(self.query(row), kv, chosen, latent=SHAPE.latent, sm_scale=SM_SCALE)

    def attend(self, row: int, keys: torch.Tensor, stored: torch.Tensor | None = None) -> torch.Tensor:
        """The same, rounded as an output is."""
        return self.part(row, keys, stored).out.to(self.dtype)

    def error(self, row: int, out: torch.Tensor) -> float:
        return relative_error(out.double().numpy(), exact(self.inputs, row))

    def excess(self, row: int, out: torch.Tensor) -> float:
        """Error of a row in budgets: above 1 it is wrong."""
        return self.error(row, out) / budget_of(self, row)


@cache
def telling(seed: int) -> TellingInputs:
    return telling_inputs(len(ROWS), EXTENT.end, SHAPE, tile=TILE, sm_scale=SM_SCALE, seed=seed)


@cache
def exact(inputs: TellingInputs, row: int) -> Array:
    """[1, heads, latent] of one row, from the oracle, over inputs that were never rounded."""
    q = inputs.q[[ROWS.index(row)]].numpy()
    return causal_mla(q, inputs.kv.numpy(), row, latent=SHAPE.latent, sm_scale=SM_SCALE)


def sees(row: int) -> torch.Tensor:
    return torch.arange(row + 1)


def twin_error(bench: Bench, row: int) -> float:
    """What the precision costs on one rank."""
    return bench.error(row, bench.attend(row, sees(row)))


@cache
def budget_of(bench: Bench, row: int) -> float:
    if bench.precision == "f64":
        return FP64_BUDGET
    return budget(twin_error(bench, row), eps=torch.finfo(bench.dtype).eps)


def errors_of_gaps(inputs: TellingInputs, row: int) -> torch.Tensor:
    """[row + 1] the error that the absence of each key makes, in float64; of rows with two keys or more.

    Without key j of weight w the output is (out − w·v) / (1 − w): it changes by w / (1 − w) · (out − v).
    """
    kv, out = inputs.kv[: row + 1], torch.from_numpy(exact(inputs, row)[0])
    weights = (inputs.q[ROWS.index(row)] @ kv.T * SM_SCALE).softmax(-1)
    worst = torch.zeros(row + 1, dtype=torch.float64)
    for weight, of_head in zip(weights, out, strict=True):
        farthest = (of_head - kv[:, : SHAPE.latent]).abs().amax(1)
        worst = worst.maximum(weight / (1 - weight) * farthest)
    return worst / out.abs().max()


# -- what is right ----------------------------------------------------------------------------------------


def merged(bench: Bench, row: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """From each part of the keys alone, put together by lse."""
    return merge_attended([bench.part(row, keys) for keys in parts]).out.to(bench.dtype)


def by_rank(row: int) -> list[torch.Tensor]:
    """Keys in a part for each rank, page by page in turn."""
    page = sees(row) // GRID.page_size
    return [sees(row)[page % GRID.world_size == rank] for rank in range(GRID.world_size)]


def with_rounded_weights(bench: Bench, row: int) -> torch.Tensor:
    """As kernels do that multiply weights and values in the type of the queries."""
    wide = accumulating_type(bench.query(row), bench.stored)
    kv = bench.stored[: row + 1].to(wide)
    scores = bench.query(row).to(wide) @ kv.T * SM_SCALE
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    summed = weights.to(bench.dtype).to(wide) @ kv[:, : SHAPE.latent]
    out: torch.Tensor = summed / weights.sum(-1, keepdim=True)
    return out.to(bench.dtype)


@proves("A5")
@pytest.mark.parametrize("seed", range(3))
@precisions
def test_a_right_result_is_within_the_budget(precision: str, seed: int) -> None:
    bench = Bench(telling(seed), precision)
    for row in ROWS[seed::3]:
        scrambled = sees(row)[torch.randperm(row + 1, generator=torch.Generator().manual_seed(seed))]
        right = {
            "scrambled": bench.attend(row, scrambled),
            "in blocks": merged(bench, row, sees(row).split(1000)),
            "merged over ranks": merged(bench, row, [part for part in by_rank(row) if len(part)]),
            "rounded weights": with_rounded_weights(bench, row),
        }
        too_far = {name: bench.excess(row, out) for name, out in right.items() if bench.excess(row, out) > 1}
        assert not too_far, f"row {row}"


# -- what is wrong ----------------------------------------------------------------------------------------


def edges(row: int) -> list[int]:
    """Keys that faults are likely to take: at the edges of what the row sees, of pages, of segments."""
    pages = (row + 1) // GRID.page_size // 2 * GRID.page_size
    near = {0, row - 1, row, pages - 1, pages, *(b + d for b in BOUNDS[5:12:3] for d in (-1, 0))}
    return sorted(key for key in near if 0 <= key <= row)


def gaps_and_doubles(bench: Bench, row: int, seed: int) -> dict[str, torch.Tensor]:
    """Outputs of a row with one key missing, twice, or replaced."""
    generator = torch.Generator().manual_seed(seed)
    keys = [*edges(row), *torch.randint(row + 1, (3,), generator=generator).tolist()]
    wrong = {f"without key {key}": sees(row).where(sees(row) != key, NO_KEY) for key in keys}
    some, other = keys[-2:]
    wrong[f"key {some} twice"] = torch.cat([sees(row), torch.tensor([some])])
    if some != other:
        wrong[f"key {some} in the place of {other}"] = sees(row).where(sees(row) != other, some)
    return {name: bench.attend(row, chosen) for name, chosen in wrong.items()}


def rows_too_many(bench: Bench, row: int) -> dict[str, torch.Tensor]:
    """Outputs of a row that sees one row more than its keys: the next key, or a pad row."""
    width, dtype = bench.stored.shape[1], bench.stored.dtype
    pads = {
        "zeros": torch.zeros(1, width, dtype=dtype),
        "NaN": torch.full((1, width), torch.nan, dtype=dtype),
        "what was there before": bench.stored[row // 3][None],
    }
    if row + 1 < len(bench.stored):
        pads["the next key"] = bench.stored[row + 1][None]
    return {
        f"also {name}": bench.attend(row, torch.arange(row + 2), torch.cat([bench.stored[: row + 1], pad]))
        for name, pad in pads.items()
    }


@proves("A5")
@precisions
def test_faults_of_a_single_token_exceed_the_budget(precision: str) -> None:
    bench = Bench(telling(0), precision)
    for row in (100, BOUNDS[8] - 1, BOUNDS[8], EXTENT.end - 1):
        wrong = gaps_and_doubles(bench, row, seed=row) | rows_too_many(bench, row)
        other_query = Bench(TellingInputs(bench.inputs.q.roll(1, 0), bench.inputs.kv), precision)
        wrong["with the query of another row"] = other_query.attend(row, sees(row))
        missed = {name: bench.excess(row, out) for name, out in wrong.items() if bench.excess(row, out) <= 1}
        assert not missed, f"row {row}"


@precisions
def test_no_key_can_be_missing(precision: str) -> None:
    bench = Bench(telling(0), precision)
    for row in ROWS[1:]:  # row 0 without its key gives 0, an error of 1
        # Gaps are worked out in float64: what the precision costs may hide as much as the twin's error.
        shown = errors_of_gaps(bench.inputs, row) - twin_error(bench, row)
        assert float(shown.min()) > budget_of(bench, row), f"row {row}"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_random_inputs_do_not_tell(precision: str) -> None:
    generator, row = torch.Generator().manual_seed(0), ROWS[-1]
    q, kv = (
        torch.randn(*size, SHAPE.width, generator=generator).double()
        for size in ((len(ROWS), SHAPE.heads), (row + 1,))
    )
    bench = Bench(TellingInputs(q, kv), precision)
    shown = errors_of_gaps(bench.inputs, row) + twin_error(bench, row)
    hidden = (shown <= budget_of(bench, row)).nonzero().flatten()
    assert len(hidden) > row / 2
    one = int(hidden[0])
    assert bench.excess(row, bench.attend(row, sees(row).where(sees(row) != one, NO_KEY))) <= 1


@precisions
def test_two_pages_that_changed_places_are_for_identity_to_find(precision: str) -> None:
    bench, row = Bench(telling(0), precision), EXTENT.end - 1
    pages = torch.arange(coverage(EXTENT.end, GRID.page_size) // GRID.page_size)
    swapped = pages.clone()
    swapped[[17, 90]] = swapped[[90, 17]]
    tags = pack(request=0, position=torch.arange(EXTENT.end), layer=0, cache=Cache.KV, write=0)
    views = []
    for row_format, packed in ((bench.format, bench.format.pack(bench.inputs.kv)), (TAG, TAG.encode(tags))):
        replica = empty_replica(GRID.page_size, row_format, len(pages))
        replica.write(pages, 0, packed)
        views.append(row_format.unpack(replica.view([(swapped, EXTENT.end)])))
    assert bench.excess(row, bench.attend(row, sees(row), views[0])) <= 1
    wrong = (views[1][:, 0] != tags).nonzero().flatten()
    assert wrong.tolist() == [*range(17 * 64, 18 * 64), *range(90 * 64, 91 * 64)]


# -- the inputs themselves --------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 64), st.integers(0, 2**16))
def test_every_key_has_a_code_and_all_but_one_cancel(tile: int, tiles: int, keys: int, seed: int) -> None:
    keys = min(keys, tile**2)
    shape = MlaShape(heads=1, latent=(1 + tiles) * tile, rope=2)
    inputs = telling_inputs(1, keys, shape, tile=tile, sm_scale=0.5, seed=seed)
    payload = inputs.kv[:, tile : shape.latent]
    loud = payload.abs().max()
    assert len(payload.unique(dim=0)) == keys
    assert bool((payload.unflatten(1, (tiles, tile)).abs().sum(-1) == loud).all())
    assert bool((payload.cumsum(0).abs() <= loud).all())


@precisions
def test_the_payload_survives_every_format(precision: str) -> None:
    bench = Bench(telling(0), precision)
    np.testing.assert_allclose(
        bench.stored[:, TILE : SHAPE.latent].double(), bench.inputs.kv[:, TILE : SHAPE.latent], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("latent", "keys", "message"),
    [(8, 4, "three whole tiles"), (13, 4, "three whole tiles"), (12, 17, "1 … 16"), (12, 0, "1 … 16")],
)
def test_inputs_that_could_not_tell_are_refused(latent: int, keys: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        telling_inputs(1, keys, MlaShape(1, latent, 2), tile=4, sm_scale=1.0, seed=0)
