"""Wrong bytes."""

from __future__ import annotations

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.storage import codecs, pages
from refmodel.storage.codecs import FP8, FP8_MAX, ScaledKey, ScaledLatent, as_bytes
from refmodel.storage.formats import Format


@mutant(pages.byte_offsets, "fmt-01", "F2", source="reported in sglang#34725, sglang#37671")
def offsets_in_32_bits(right: Right, slots: torch.Tensor, row_format: Format, page_size: int) -> torch.Tensor:
    """Byte offsets are computed in the 32 bits of the slots: they wrap beyond 2³¹."""
    return right(slots, row_format, page_size).to(torch.int32).to(torch.int64)


@mutant(codecs.quantize, "fmt-02", "F1", source="derived from the upstream quantizer")
def no_least_scale(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of an all-zero tile is zero: its elements become 0/0."""
    tile = values.to(torch.float32)
    scale = tile.abs().amax(-1, keepdim=True) / FP8_MAX
    return (tile / scale).to(FP8), scale


@mutant(ScaledKey.pack, "fmt-03", "F1", source="reported in ATOM#793")
def one_scale_for_the_tensor(self: ScaledKey, values: torch.Tensor) -> torch.Tensor:
    """One scale is stored for the whole tensor, and one is read for each token: past the end."""
    elements, scale = codecs.quantize(values.flatten())
    scales = torch.full((len(values), 4), 255, dtype=torch.uint8)
    scales[:1] = as_bytes(scale)
    return torch.cat([as_bytes(elements.view_as(values)), scales], -1)


@mutant(Format.fields, "scales-among-the-keys", "F1")
def rows_one_behind_the_other(self: Format) -> tuple[int, ...]:
    """Every format is one field: in a page of index_fp8 each key is followed by its scale."""
    return (sum(self.codec.fields),)


@mutant(codecs.quantize, "scale-in-bf16", "F1")
def scale_rounded_to_bf16(right: Right, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored scale has the precision of bf16, the elements were divided by the exact one."""
    elements, scale = right(values)
    return elements, scale.to(torch.bfloat16).to(torch.float32)


@mutant(ScaledLatent.pack, "rope-before-the-scales", "F1")
def rope_before_the_scales(right: Right, self: ScaledLatent, values: torch.Tensor) -> torch.Tensor:
    """The rope part stands between the fp8 elements and their scales."""
    scale_bytes, rope_bytes = self.latent // self.tile * 4, self.rope * 2
    elements, scales, rope = right(self, values).split((self.latent, scale_bytes, rope_bytes), -1)
    return torch.cat([elements, rope, scales], -1)


@mutant(codecs.quantize, "rounded-twice", "F1")
def rounded_to_bf16_first(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements pass through bf16 on their way to fp8: rounded twice, some go to the wrong neighbour."""
    tile = values.to(torch.float32)
    scale = tile.abs().amax(-1, keepdim=True).clamp(min=codecs.LEAST_AMAX) / FP8_MAX
    return (tile / scale).to(torch.bfloat16).to(FP8), scale


@mutant(pages.write_rows, "first-field-only", "F1")
def scales_not_written(
    right: Right, cache: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor, row_format: Format
) -> None:
    """Only the first field of a row is written: the scales of index_fp8 stay what they were."""
    stored = pages.read_rows(cache, slots, row_format)
    size = row_format.fields[0]
    right(cache, slots, torch.cat([packed[:, :size], stored[:, size:]], 1), row_format)
