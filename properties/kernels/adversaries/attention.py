"""Wrong kernels of the operations in :mod:`refmodel.ops.attention`."""

from __future__ import annotations

from math import log

import torch

from properties.kernels.adversaries.adversary import adversary
from refmodel.attention.accumulating import accumulating_type
from refmodel.ops.attention import LSE_MERGE, MQA_LOGITS, SPARSE_MLA
from refmodel.ops.op import Results

Tensor = torch.Tensor

# -- the indexer -------------------------------------------------------------------------------------------


@adversary("mqa_logits", law="A1")
def relu_of_the_sum(
    q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
) -> Results:
    """Heads are summed first, and the negative part is cut from the sum."""
    wide = accumulating_type(q, keys)
    dots = torch.einsum("mhd,nd->mhn", q.to(wide), keys.to(wide))
    return (torch.einsum("mh,mhn->mn", weights.to(wide), dots).relu() * scale.to(wide),)


@adversary("mqa_logits", law="A1")
def without_the_scale(
    q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
) -> Results:
    """Quantized keys are used as they are stored."""
    return MQA_LOGITS.reference(q, keys, torch.ones_like(scale), weights, ks, ke)


@adversary("mqa_logits", law="A1")
def scale_of_the_key_before(
    q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
) -> Results:
    """Scales are read one key too early."""
    return MQA_LOGITS.reference(q, keys, scale.roll(1), weights, ks, ke)


@adversary("mqa_logits", law="A1")
def weights_of_the_row_before(
    q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
) -> Results:
    """Weights are cut one row beside the queries."""
    return MQA_LOGITS.reference(q, keys, scale, weights.roll(1, 0), ks, ke)


@adversary("mqa_logits", law="A1")
def own_key_left_out(
    q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
) -> Results:
    """ke is off by one: a row does not see its own key."""
    (logits,) = MQA_LOGITS.reference(q, keys, scale, weights, ks, torch.maximum(ks, ke - 1))
    return (logits.nan_to_num(nan=-torch.inf),)


@adversary("mqa_logits", law="A1")
def counted_from_ks(
    q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
) -> Results:
    """Logits stand from column 0 on, not from ks: right for one request."""
    (logits,) = MQA_LOGITS.reference(q, keys, scale, weights, ks, ke)
    columns = torch.arange(len(keys)) + ks[:, None]
    return (logits.gather(1, columns.clamp(max=max(0, len(keys) - 1))) if len(keys) else logits,)


@adversary("mqa_logits", law="A1")
def dots_in_bf16(q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor) -> Results:
    """Dots are rounded to bf16 before heads are summed."""
    wide = accumulating_type(q, keys)
    dots = torch.einsum("mhd,nd->mhn", q.to(wide), keys.to(wide)).bfloat16().relu().to(wide)
    return (torch.einsum("mh,mhn->mn", weights.to(wide), dots) * scale.to(wide),)


@adversary("mqa_logits", law="A1")
def logits_of_nan(q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor) -> Results:
    """NaN everywhere, which compares as neither higher nor lower."""
    return (torch.full((len(q), len(keys)), torch.nan, dtype=accumulating_type(q, keys)),)


@adversary("mqa_logits", law="A1")
def logits_of_zero(
    q: Tensor, keys: Tensor, scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
) -> Results:
    """Returns zeros."""
    return (torch.zeros(len(q), len(keys), dtype=accumulating_type(q, keys)),)


# -- sparse MLA --------------------------------------------------------------------------------------------


@adversary("sparse_mla", law="A4")
def scores_without_scale(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """sm_scale is forgotten."""
    return SPARSE_MLA.reference(q, kv, chosen, latent, 1.0)


@adversary("sparse_mla", law="A4")
def scaled_twice(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """sm_scale is in the queries, and multiplied once more."""
    return SPARSE_MLA.reference(q, kv, chosen, latent, sm_scale**2)


@adversary("sparse_mla", law="A4")
def rope_in_the_value(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """The value is the last part of a row, so that its rope part is in it."""
    rope = q.shape[2] - latent
    return SPARSE_MLA.reference(q.roll(-rope, 2), kv.roll(-rope, 1), chosen, latent, sm_scale)


@adversary("sparse_mla", law="A4")
def rope_not_in_the_score(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """Scores are of the latent part alone."""
    return SPARSE_MLA.reference(q[..., :latent], kv[:, :latent], chosen, latent, sm_scale)


@adversary("sparse_mla", law="A4")
def lse_in_base_2(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """lse is a logarithm to base 2, as kernels compute with."""
    out, lse = SPARSE_MLA.reference(q, kv, chosen, latent, sm_scale)
    return out, lse / log(2)


@adversary("sparse_mla", law="A4")
def none_is_the_first_row(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """−1 is clamped and attended to as row 0, where there is one."""
    none = 0 if len(kv) else -1
    return SPARSE_MLA.reference(q, kv, chosen.where(chosen >= 0, none), latent, sm_scale)


@adversary("sparse_mla", law="A4")
def none_is_a_row_of_zeros(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """What is not chosen is not masked: it has a score of 0."""
    padded = torch.cat([kv, kv.new_zeros(1, kv.shape[1])])
    return SPARSE_MLA.reference(q, padded, chosen.where(chosen >= 0, len(kv)), latent, sm_scale)


@adversary("sparse_mla", law="A4")
def until_the_first_gap(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """A row is read until its first −1: right where −1 stands behind the keys only."""
    reached = (chosen >= 0).cumprod(1).bool()
    return SPARSE_MLA.reference(q, kv, chosen.where(reached, -1), latent, sm_scale)


@adversary("sparse_mla", law="A4")
def last_entry_dropped(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """The last entry of each row is not read."""
    return SPARSE_MLA.reference(q, kv, chosen[:, :-1], latent, sm_scale)


@adversary("sparse_mla", law="A4")
def one_key_counts_twice(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """The first entry of each row is read twice."""
    return SPARSE_MLA.reference(q, kv, torch.cat([chosen[:, :1], chosen], 1), latent, sm_scale)


@adversary("sparse_mla", law="A4")
def no_keys_give_nan(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """A row without keys is divided by the sum of its weights, 0."""
    out, lse = SPARSE_MLA.reference(q, kv, chosen, latent, sm_scale)
    return out.masked_fill(lse.isinf()[..., None], torch.nan), lse


@adversary("sparse_mla", law="A4")
def no_keys_give_plus_infinity(
    q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float
) -> Results:
    """lse of a row without keys is +inf."""
    out, lse = SPARSE_MLA.reference(q, kv, chosen, latent, sm_scale)
    return out, lse.masked_fill(lse.isinf(), torch.inf)


@adversary("sparse_mla", law="A4")
def exponentials_overflow(q: Tensor, kv: Tensor, chosen: Tensor, latent: int, sm_scale: float) -> Results:
    """The largest score is not subtracted before exponentials are taken: right for small scores."""
    wide = accumulating_type(q, kv)
    present = (chosen >= 0)[:, None]
    keys = kv[chosen.clamp(min=0)].to(wide).masked_fill(~present[:, 0, :, None], 0) if len(kv) else None
    if keys is None:
        return SPARSE_MLA.reference(q, kv, chosen, latent, sm_scale)
    scores = torch.einsum("mhd,mkd->mhk", q.to(wide), keys) * sm_scale
    weights = scores.exp().float().masked_fill(~present, 0)
    total = weights.sum(-1)
    out = (
        torch.einsum("mhk,mkd->mhd", weights.to(wide), keys[..., :latent]) / total.clamp(min=1e-30)[..., None]
    )
    return out.to(q.dtype), total.log().to(wide)


# -- merge -------------------------------------------------------------------------------------------------


@adversary("lse_merge", law="A6")
def empty_part_gives_nan(outs: Tensor, lses: Tensor) -> Results:
    """The output of a part without keys is multiplied with its weight, 0, whatever it is."""
    wide = accumulating_type(outs, lses)
    weights = lses.softmax(0).to(wide)
    return (weights[..., None] * outs.to(wide)).sum(0).to(outs.dtype), lses.logsumexp(0)


@adversary("lse_merge", law="A6")
def infinities_subtracted(outs: Tensor, lses: Tensor) -> Results:
    """If no part has keys, −inf is subtracted from −inf."""
    out, _ = LSE_MERGE.reference(outs, lses)
    largest = lses.amax(0)
    return out, (lses - largest).exp().sum(0).log() + largest


@adversary("lse_merge", law="A6")
def empty_part_weighs_in(outs: Tensor, lses: Tensor) -> Results:
    """A part without keys is taken for one whose lse is 0."""
    empty = lses.isinf()
    return LSE_MERGE.reference(outs.masked_fill(empty[..., None], 0), lses.masked_fill(empty, 0))


@adversary("lse_merge", law="A6")
def last_part_only(outs: Tensor, lses: Tensor) -> Results:
    """Each part overwrites what the parts before it left."""
    return LSE_MERGE.reference(outs[-1:], lses[-1:])


@adversary("lse_merge", law="A6")
def first_part_left_out(outs: Tensor, lses: Tensor) -> Results:
    """The state that a merge starts from is nothing, and takes the place of part 0."""
    return LSE_MERGE.reference(outs, torch.cat([torch.full_like(lses[:1], -torch.inf), lses[1:]]))


@adversary("lse_merge", law="A6")
def plain_mean(outs: Tensor, lses: Tensor) -> Results:
    """Parts weigh the same, as if each had as many keys."""
    present = ~lses.isinf()
    level = torch.zeros_like(lses).masked_fill(~present, -torch.inf)
    return LSE_MERGE.reference(outs, level)[0], LSE_MERGE.reference(outs, lses)[1]


@adversary("lse_merge", law="A6")
def weights_in_base_2(outs: Tensor, lses: Tensor) -> Results:
    """Weights are powers of two of natural logarithms."""
    out, _ = LSE_MERGE.reference(outs, lses * log(2))
    return out, LSE_MERGE.reference(outs, lses)[1]


@adversary("lse_merge", law="A6")
def merged_weights_overflow(outs: Tensor, lses: Tensor) -> Results:
    """Exponentials of lse as it is: right while they are small."""
    weights = lses.float().exp()
    total = weights.sum(0)
    kept = outs.masked_fill(lses.isinf()[..., None], 0).to(accumulating_type(outs, lses))
    out = (weights[..., None] * kept).sum(0) / total.clamp(min=1e-30)[..., None]
    return out.to(outs.dtype), total.log().to(lses.dtype)


@adversary("lse_merge", law="A6")
def largest_lse_only(outs: Tensor, lses: Tensor) -> Results:
    """lse of the whole is that of its largest part."""
    return LSE_MERGE.reference(outs, lses)[0], lses.amax(0)
