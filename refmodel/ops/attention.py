"""Operations of attention: scores of the indexer, sparse MLA, and its merge (laws A1, A4, A6).

Results of low precision are compared in budgets, row by row (law A5). Two equal keys share the weight; a row
without keys gives 0 and lse −inf:

>>> kv = torch.tensor([[1.0, 0.0], [3.0, -2.0]])
>>> out, lse = SPARSE_MLA.reference(torch.ones(2, 1, 2), kv, torch.tensor([[0, 1], [-1, -1]]), 1, 1.0)
>>> out.flatten().tolist(), lse.flatten().tolist()
([2.0, 0.0], [1.693..., -inf])
"""

from __future__ import annotations

import torch

from refmodel.attention import indexer, sparse
from refmodel.attention.accumulating import accumulating_type
from refmodel.attention.merge import merge_attended
from refmodel.attention.ranges import KeyRanges
from refmodel.attention.sparse import Attended, Chosen
from refmodel.attention.topk import NO_KEY
from refmodel.errors import Finding
from refmodel.ops.judges import Scale, largest_of_rows, within_budget
from refmodel.ops.op import Argument, Arguments, Cost, Kind, Op, Result, Results, Space

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def ranges_of(ks: torch.Tensor, ke: torch.Tensor, num_keys: int) -> KeyRanges:
    """Ranges as kernels take them, int32 or int64."""
    return KeyRanges(ks.to(torch.int64), ke.to(torch.int64), num_keys)


# -- the indexer -------------------------------------------------------------------------------------------


def _mqa_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
) -> Results:
    return (indexer.mqa_logits(q, keys, scale, weights, ranges_of(ks, ke, len(keys))),)


def _visible(given: Arguments) -> torch.Tensor:
    return ranges_of(given["ks"], given["ke"], len(given["keys"])).visible()


def _scale_of_logits(given: Arguments, exact: Results) -> tuple[Scale, ...]:
    """No roundings beyond the twin's: cases are integers, and their sums exact in any order."""
    largest = largest_of_rows(exact[0].masked_fill(~_visible(given), 0))
    none = torch.zeros_like(largest)
    return (Scale(largest, wide=none, narrow=none),)


def _cost_of_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
) -> Cost:
    logits = int((ke - ks).sum())
    read = sum(tensor.nbytes for tensor in (q, keys, scale, weights, ks, ke))
    return Cost(read + logits * accumulating_type(q, keys).itemsize, 2 * logits * q.shape[1] * q.shape[2])


MQA_LOGITS = Op(
    name="mqa_logits",
    meaning="Σ over heads of weight · relu(q · key) · scale of the key, for the keys that a row may see.",
    arguments=(
        Argument("q", Kind.VALUES, "queries", "[m, heads, dim]", (torch.float8_e4m3fn, *FLOATS)),
        Argument("keys", Kind.VALUES, "one a token", "[n, dim]", (torch.float8_e4m3fn, *FLOATS)),
        Argument("scale", Kind.VALUES, "of each key", "[n]", (torch.float32,)),
        Argument("weights", Kind.VALUES, "of each head", "[m, heads]", (torch.float32, torch.float64)),
        Argument("ks", Kind.INDEX, "first key that a row sees", "[m]"),
        Argument("ke", Kind.INDEX, "behind the last one; ks = ke sees nothing", "[m]"),
    ),
    results=(Result("logits", "[m, n]", "float32, of float64 float64; undefined outside ks ≤ n < ke"),),
    reference=_mqa_logits,
    spaces=lambda q, keys, scale, weights, ks, ke: (Space((len(q), len(keys)), accumulating_type(q, keys)),),
    judge=within_budget(
        "A1", _mqa_logits, _scale_of_logits, defined=_visible, by_row=("q", "weights", "ks", "ke")
    ),
    compared="within a budget, where ks ≤ n < ke",
    laws=("A1", "A5", "S6", "S9"),
    cost=_cost_of_logits,
    row_width=lambda q, keys, scale, weights, ks, ke: q.shape[-1],
)

# -- sparse MLA --------------------------------------------------------------------------------------------


def _sparse_mla(
    q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, latent: int, sm_scale: float
) -> Results:
    keys = Chosen(chosen.to(torch.int64), len(kv))
    attended = sparse.sparse_mla(q, kv, keys, latent=latent, sm_scale=sm_scale)
    return attended.out.to(q.dtype), attended.lse


def _scales_of_attended(given: Arguments, exact: Results) -> tuple[Scale, ...]:
    """What scores are off by, weights and lse are, too; and kernels may round weights to the type of q."""
    q, kv, chosen = given["q"].double(), given["kv"].double(), given["chosen"]
    latent, sm_scale = given["latent"], given["sm_scale"]
    # lse over sums without signs: no score, nor a part of it, is larger.
    _, magnitudes = _sparse_mla(q.abs(), kv.abs(), chosen, latent, sm_scale)
    score = largest_of_rows(magnitudes).clamp(min=1)
    steps, largest = score * q.shape[2] ** 0.5, largest_of_rows(exact[0])
    rounded = largest_of_rows(_root_of_squares(q, kv, chosen, latent, sm_scale, exact[1]))
    return (
        Scale(largest, wide=steps, narrow=torch.where(largest > 0, rounded / largest, 0)),
        Scale(score, wide=steps / score, narrow=torch.zeros_like(score)),
    )


def _root_of_squares(
    q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, latent: int, sm_scale: float, lse: torch.Tensor
) -> torch.Tensor:
    """[m, heads, latent] √Σ (weight · value)²: attention to squares of values, with scores twice as high."""
    squares = torch.cat([kv[:, :latent] ** 2, kv], 1)
    twice = torch.cat([torch.zeros_like(q[..., :latent]), 2 * q], 2)
    mean, doubled = _sparse_mla(twice, squares, chosen, latent, sm_scale)
    total = (doubled - 2 * lse).nan_to_num(nan=-torch.inf).exp()  # Σ weight²; nothing without keys
    return (mean * total[..., None]).sqrt()


_within_budget = within_budget("A4", _sparse_mla, _scales_of_attended, by_row=("q", "chosen"))


def _judge_attended(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
    """Over the rows of kv that somebody chose: of a large cache they are few."""
    used, places = arguments["chosen"].unique(return_inverse=True)
    first = int((used == NO_KEY).any())
    few = {"kv": arguments["kv"][used[first:].to(torch.int64)], "chosen": places - first}
    return _within_budget({**arguments, **few}, received, expected)


def _cost_of_sparse(
    q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, latent: int, sm_scale: float
) -> Cost:
    present = chosen[chosen != NO_KEY]
    rows, heads, width = q.shape
    written = rows * heads * (latent * q.dtype.itemsize + accumulating_type(q, kv).itemsize)
    read = q.nbytes + chosen.nbytes + len(present.unique()) * width * kv.dtype.itemsize
    return Cost(read + written, 2 * len(present) * heads * (width + latent))


SPARSE_MLA = Op(
    name="sparse_mla",
    meaning="Attention of each row over the rows that it chose; the latent part of a row is its value.",
    arguments=(
        Argument("q", Kind.VALUES, "queries", "[m, heads, latent + rope]", FLOATS),
        Argument(
            "kv", Kind.VALUES, "of q's type; what nobody chose may hold NaN", "[n, latent + rope]", FLOATS
        ),
        Argument("chosen", Kind.INDEX, "rows of kv, each once a row; −1, anywhere, for none", "[m, k]"),
        Argument("latent", Kind.INT, "elements of a row that are its value"),
        Argument("sm_scale", Kind.FLOAT, "by which scores are multiplied"),
    ),
    results=(
        Result("out", "[m, heads, latent]", "of the type of q; 0 for a row without keys"),
        Result("lse", "[m, heads]", "natural logarithm, float32, of float64 float64; −inf without keys"),
    ),
    reference=_sparse_mla,
    spaces=lambda q, kv, chosen, latent, sm_scale: (
        Space((*q.shape[:2], latent), q.dtype),
        Space(tuple(q.shape[:2]), accumulating_type(q, kv)),
    ),
    judge=_judge_attended,
    compared="within a budget",
    laws=("A4", "A5"),
    cost=_cost_of_sparse,
    row_width=lambda q, kv, chosen, latent, sm_scale: q.shape[-1],
)

# -- merge -------------------------------------------------------------------------------------------------


def _lse_merge(outs: torch.Tensor, lses: torch.Tensor) -> Results:
    wide = outs.to(accumulating_type(outs, lses))
    merged = merge_attended([Attended(out, lse) for out, lse in zip(wide, lses, strict=True)])
    return merged.out.to(outs.dtype), merged.lse


def _scales_of_merged(given: Arguments, exact: Results) -> tuple[Scale, ...]:
    """A weight is off by as many roundings as its lse is large."""
    outs, lses = given["outs"].double(), given["lses"].double()
    largest_lse = largest_of_rows(lses.movedim(0, 1)).clamp(min=1)
    magnitudes, _ = _lse_merge(outs.abs(), lses)
    steps, none = torch.full_like(largest_lse, len(outs) ** 0.5), torch.zeros_like(largest_lse)
    return (
        Scale(largest_of_rows(magnitudes), wide=largest_lse + steps, narrow=none),
        Scale(largest_lse, wide=steps, narrow=none),
    )


LSE_MERGE = Op(
    name="lse_merge",
    meaning="Attention over all keys, from its results over parts of them.",
    arguments=(
        Argument("outs", Kind.VALUES, "of parts that share no key", "[parts, m, heads, latent]", FLOATS),
        Argument(
            "lses", Kind.VALUES, "−inf: the part had no keys, and its out may hold NaN", "[parts, m, heads]"
        ),
    ),
    results=(
        Result("out", "[m, heads, latent]", "of the type of outs; 0 if no part had keys"),
        Result("lse", "[m, heads]", "of the type of lses; −inf if no part had keys"),
    ),
    reference=_lse_merge,
    spaces=lambda outs, lses: (
        Space(tuple(outs.shape[1:]), outs.dtype),
        Space(tuple(lses.shape[1:]), lses.dtype),
    ),
    judge=within_budget("A6", _lse_merge, _scales_of_merged),
    compared="within a budget",
    laws=("A5", "A6"),
    cost=lambda outs, lses: Cost(
        outs.nbytes + lses.nbytes + outs[:1].nbytes + lses[:1].nbytes, 2 * outs.numel()
    ),
    row_width=lambda outs, lses: outs.shape[-1],
)
