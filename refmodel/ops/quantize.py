"""Operations that make fp8 of values (law F1)."""

from __future__ import annotations

import torch

from refmodel.ops.op import Argument, Arguments, Cost, Kind, Op, Result, Results, Space
from refmodel.ops.rounding import Quantized, within_rounding
from refmodel.storage.codecs import as_bytes, as_type, quantize
from refmodel.storage.formats import mla_format

_SCALE_BYTES = 4
_FLOATS = (torch.float32, torch.bfloat16)


def _quantize_index(keys: torch.Tensor) -> Results:
    """Of 448 and 1 the scale is 1: the bytes are those of 448 and 1 in e4m3.

    >>> _quantize_index(torch.tensor([[448.0, 1.0]]))
    (tensor([[126,  56]], dtype=torch.uint8), tensor([1.]))
    """
    elements, scales = quantize(keys)
    return as_bytes(elements), scales[:, 0]


def _index_quantized(arguments: Arguments, received: Results) -> Quantized:
    elements, scales = received
    nothing = elements[:, :0]
    return Quantized(arguments["keys"][:, None], elements[:, None], scales[:, None], nothing, nothing)


QUANTIZE_INDEX = Op(
    name="quantize_index",
    meaning="Index keys → fp8-e4m3 and one scale a key, max(amax, 1e-4) / 448.",
    arguments=(Argument("keys", Kind.VALUES, "finite", "[n, dim]", _FLOATS),),
    results=(
        Result("elements", "[n, dim]", "uint8: bytes of fp8-e4m3"),
        Result("scales", "[n]", "fp32"),
    ),
    reference=_quantize_index,
    spaces=lambda keys: (Space(tuple(keys.shape), torch.uint8), Space((len(keys),), torch.float32)),
    judge=within_rounding(_index_quantized),
    compared="elements within one rounding at the received scale, scales within two units of fp32",
    laws=("F1",),
    cost=lambda keys: Cost(keys.nbytes + keys.numel() + _SCALE_BYTES * len(keys), 3 * keys.numel()),
    row_width=lambda keys: keys.shape[-1],
)


def _quantize_mla(rows: torch.Tensor, latent: int, tile: int) -> Results:
    """Two elements in one tile, the bytes of its scale, 1, and those of one bf16.

    >>> _quantize_mla(torch.tensor([[448.0, 1.0, 2.0]]), latent=2, tile=2)[0].tolist()
    [[126, 56, 0, 0, 128, 63, 0, 64]]
    """
    return (mla_format("fp8", latent=latent, rope=rows.shape[1] - latent, tile=tile).pack(rows),)


def _packed_bytes(rows: torch.Tensor, latent: int, tile: int) -> int:
    return latent + _SCALE_BYTES * (latent // tile) + 2 * (rows.shape[1] - latent)


def _mla_quantized(arguments: Arguments, received: Results) -> Quantized:
    rows, latent, tile = (arguments[name] for name in ("rows", "latent", "tile"))
    scale_bytes = _SCALE_BYTES * (latent // tile)
    elements, scales, rope = received[0].split(
        (latent, scale_bytes, received[0].shape[1] - latent - scale_bytes), 1
    )
    return Quantized(
        values=rows[:, :latent].unflatten(1, (-1, tile)),
        elements=elements.unflatten(1, (-1, tile)),
        scales=as_type(scales, torch.float32),
        plain=rope,
        plain_values=as_bytes(rows[:, latent:].to(torch.bfloat16)),
    )


QUANTIZE_MLA = Op(
    name="quantize_mla",
    meaning="Rows of MLA KV → packed rows: fp8 latent, a scale for each tile of it, rope as bf16.",
    arguments=(
        Argument("rows", Kind.VALUES, "finite", "[n, latent + rope]", _FLOATS),
        Argument("latent", Kind.INT, "elements to quantize"),
        Argument("tile", Kind.INT, "of them a scale; divides latent"),
    ),
    results=(Result("packed", "[n, latent + 4 × latent / tile + 2 × rope]", "uint8"),),
    reference=_quantize_mla,
    spaces=lambda rows, latent, tile: (Space((len(rows), _packed_bytes(rows, latent, tile)), torch.uint8),),
    judge=within_rounding(_mla_quantized),
    compared="elements within one rounding at the received scale, scales within two fp32 units; rope exactly",
    laws=("F1",),
    cost=lambda rows, latent, tile: Cost(
        rows.nbytes + len(rows) * _packed_bytes(rows, latent, tile), 3 * len(rows) * latent
    ),
    row_width=lambda rows, latent, tile: rows.shape[-1],
)
