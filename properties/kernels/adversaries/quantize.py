"""Wrong kernels of the operations in :mod:`refmodel.ops.quantize`."""

from __future__ import annotations

import torch

from properties.kernels.adversaries.adversary import adversary
from refmodel.ops.quantize import QUANTIZE_MLA
from refmodel.storage.codecs import FP8, FP8_MAX, LEAST_AMAX, as_bytes, quantize

Tensor = torch.Tensor
Quantized = tuple[Tensor, Tensor]


def _over(keys: Tensor, scale: Tensor) -> Quantized:
    """(elements, scales) of keys [n, dim] over a scale [n, 1]."""
    quotient = (keys.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    return as_bytes(quotient.to(FP8)), scale[:, 0]


def _scale(keys: Tensor) -> Tensor:
    return quantize(keys)[1]


# -- quantize_index ----------------------------------------------------------------------------------------


@adversary("quantize_index", law="F1")
def scale_turned_over(keys: Tensor) -> Quantized:
    """What is stored is 448 / amax, by which elements were multiplied: not by which they must be."""
    elements, scale = quantize(keys)
    return as_bytes(elements), 1 / scale[:, 0]


@adversary("quantize_index", law="F1")
def nothing_over_nothing(keys: Tensor) -> Quantized:
    """There is no least amax: an all-zero key becomes 0/0."""
    return _over(keys, keys.float().abs().amax(-1, keepdim=True) / FP8_MAX)


@adversary("quantize_index", law="F1")
def scale_a_power_of_two(keys: Tensor) -> Quantized:
    """The scale is rounded up to a power of two, as formats with 8 bits of exponent have it."""
    return _over(keys, 2.0 ** _scale(keys).log2().ceil())


@adversary("quantize_index", law="F1")
def scale_of_the_whole_tensor(keys: Tensor) -> Quantized:
    """The largest element of all keys sets every scale: right for one key."""
    scale = _scale(keys)
    return _over(keys, scale.amax().expand_as(scale).contiguous() if len(keys) else scale)


@adversary("quantize_index", law="F1")
def rounded_to_bf16_on_the_way(keys: Tensor) -> Quantized:
    """Quotients are rounded to bf16, then to fp8: some go to the wrong neighbour."""
    scale = _scale(keys)
    return as_bytes((keys.float() / scale).to(torch.bfloat16).to(FP8)), scale[:, 0]


@adversary("quantize_index", law="F1")
def scale_stored_in_bf16(keys: Tensor) -> Quantized:
    """Elements are divided by the exact scale, and a rounded one is stored."""
    elements, scale = quantize(keys)
    return as_bytes(elements), scale[:, 0].to(torch.bfloat16).float()


@adversary("quantize_index", law="F1")
def rounded_towards_zero(keys: Tensor) -> Quantized:
    """The bits that fp8 has no room for are cut off."""
    scale = _scale(keys)
    quotient = keys.float() / scale
    nearest = quotient.to(FP8)
    codes = as_bytes(nearest)
    too_large = nearest.float().abs() > quotient.abs()
    return codes - too_large.to(torch.uint8), scale[:, 0]


@adversary("quantize_index", law="F1")
def least_amax_forgotten_in_the_scale(keys: Tensor) -> Quantized:
    """The least amax is a least scale: keys below 448 × 1e-4 get too large a one."""
    return _over(keys, (keys.float().abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=LEAST_AMAX))


# -- quantize_mla ------------------------------------------------------------------------------------------


def _parts(rows: Tensor, latent: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """(elements, scales, rope) of right packed rows, as bytes."""
    packed = QUANTIZE_MLA.reference(rows, latent, tile)[0]
    scale_bytes = 4 * (latent // tile)
    stop = latent + scale_bytes
    return packed[:, :latent], packed[:, latent:stop], packed[:, stop:]


@adversary("quantize_mla", law="F1")
def rope_before_the_scales(rows: Tensor, latent: int, tile: int) -> Tensor:
    """The rope part stands between elements and scales."""
    elements, scales, rope = _parts(rows, latent, tile)
    return torch.cat([elements, rope, scales], 1)


@adversary("quantize_mla", law="F1")
def one_scale_a_row(rows: Tensor, latent: int, tile: int) -> Tensor:
    """The largest element of a row sets the scales of all its tiles: right for one tile."""
    values = rows[:, :latent].float()
    scale = _scale(values)
    elements = as_bytes((values / scale).to(FP8))
    scales = as_bytes(scale.expand(-1, latent // tile))
    return torch.cat([elements, scales, _parts(rows, latent, tile)[2]], 1)


@adversary("quantize_mla", law="F1")
def tiles_without_a_least_scale(rows: Tensor, latent: int, tile: int) -> Tensor:
    """There is no least amax: an all-zero tile becomes 0/0."""
    tiles = rows[:, :latent].float().unflatten(1, (-1, tile))
    scales = tiles.abs().amax(-1, keepdim=True) / FP8_MAX
    elements = (tiles / scales).to(FP8).flatten(1)
    return torch.cat([as_bytes(elements), as_bytes(scales[..., 0]), _parts(rows, latent, tile)[2]], 1)


@adversary("quantize_mla", law="F1")
def rope_cut_to_bf16(rows: Tensor, latent: int, tile: int) -> Tensor:
    """The lower half of each rope element is cut off, not rounded: right for rows of bf16."""
    elements, scales, _ = _parts(rows, latent, tile)
    rope = rows[:, latent:].float()
    upper = as_bytes(rope).view(len(rows), rope.shape[1], 4)[:, :, 2:]
    return torch.cat([elements, scales, upper.flatten(1)], 1)


@adversary("quantize_mla", law="F1")
def tiles_of_the_next_row(rows: Tensor, latent: int, tile: int) -> Tensor:
    """Scales are stored column by column, as in a transposed buffer: right for one row, or one tile."""
    elements, scales, rope = _parts(rows, latent, tile)
    turned = scales.unflatten(1, (latent // tile, 4)).transpose(0, 1).reshape(scales.shape)
    return torch.cat([elements, turned, rope], 1)
