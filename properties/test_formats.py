"""Laws F1, F2: what a token is in bytes, and where those bytes lie."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import FORMATS, near
from refmodel.errors import InvalidInput
from refmodel.storage.codecs import quantize
from refmodel.storage.formats import PRECISIONS, TAG, Format, index_format, mla_format
from refmodel.storage.pages import byte_offsets, read_rows, rows_of_pages, write_rows

Floats = npt.NDArray[np.float32]

MLA_SIZES = ((512, 64, 128), (8, 2, 4), (6, 3, 2), (3, 0, 3))  # latent, rope, tile
INDEX_SIZES = (128, 8, 5)
PRODUCTION = tuple(mla_format(p, latent=512, rope=64) for p in PRECISIONS) + tuple(
    index_format(p, 128) for p in PRECISIONS
)
seeds = st.integers(0, 2**16)
scaled = st.sampled_from([f for f in (*FORMATS, *PRODUCTION) if f.name.endswith("fp8")])
plain = st.sampled_from([f for f in FORMATS if not f.name.endswith("fp8")])


def drawn(n: int, width: int, seed: int) -> torch.Tensor:
    """fp32 [n, width] of very unequal rows: some of one magnitude, some of many, some all zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, width, generator=generator)
    scale = torch.randint(-8, 9, (n, 1), generator=generator)
    spread = torch.randint(0, 2, (n, 1), generator=generator)
    spread = spread * torch.randint(-12, 1, (n, width), generator=generator)
    zero = torch.randint(0, 6, (n, 1), generator=generator) == 0
    return torch.where(zero, 0.0, values * 2.0 ** (scale + spread))


# -- F1: values --------------------------------------------------------------------------------------------


@proves("F1")
@given(plain, st.integers(0, 9), seeds)
def test_plain_rows_come_back_exactly(fmt: Format, n: int, seed: int) -> None:
    dtype = fmt.unpack(fmt.pack(torch.zeros(0, fmt.width))).dtype
    values = drawn(n, fmt.width, seed).to(dtype)
    packed = fmt.pack(values)
    assert packed.shape == (n, fmt.bytes_per_token)
    assert bytes(packed.flatten().tolist()) == bytes(values.flatten().view(torch.uint8).tolist())
    assert torch.equal(fmt.unpack(packed), values)


@proves("F1")
@given(st.integers(0, 9), seeds)
def test_any_identity_comes_back_exactly(n: int, seed: int) -> None:
    tags = torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(TAG.unpack(TAG.encode(tags))[:, 0], tags)


def half_spacing(magnitude: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Half the distance between neighbours in e4m3: 3 bits behind the leading one, at least 2⁻⁹ apart."""
    exponent = np.frexp(magnitude)[1] - 1  # 2**exponent <= magnitude < 2**(exponent + 1)
    return np.asarray(2.0 ** (np.maximum(exponent, -6) - 3) / 2)


@proves("F1")
@given(st.integers(1, 40), st.sampled_from([1, 2, 8, 128]), seeds)
def test_fp8_elements_are_one_rounding_away(n: int, width: int, seed: int) -> None:
    values = drawn(n, width, seed)
    elements, scales = quantize(values)
    tiles = values.numpy()
    amax = np.abs(tiles).max(-1, keepdims=True)
    scale = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    assert np.array_equal(scales.numpy(), scale)
    wanted = (tiles / scale).astype(np.float64)  # in fp32, as a kernel divides; exact from here on
    assert np.all(np.abs(elements.double().numpy() - wanted) <= half_spacing(np.abs(wanted)))


@proves("F1")
@given(scaled, st.integers(1, 9), seeds)
def test_fp8_rows_come_back_within_a_rounding_times_their_scale(fmt: Format, n: int, seed: int) -> None:
    latent, rope, tile = (fmt.width, 0, fmt.width)
    if fmt.name == "mla_fp8":
        latent, rope, tile = (512, 64, 128) if fmt.width == 576 else (6, 3, 2)
    values = drawn(n, fmt.width, seed)
    returned = fmt.unpack(fmt.pack(values))
    assert returned.dtype == torch.float32
    assert torch.equal(returned[:, latent:], values[:, latent:].bfloat16().float())
    assert returned.shape[1] == latent + rope
    tiles = values[:, :latent].double().unflatten(1, (-1, tile)).numpy()
    scale = np.maximum(np.abs(tiles).max(-1, keepdims=True), 1e-4) / 448
    # Beside the one of fp8, four roundings of fp32: of 1e-4, of the scale, the quotient and the product.
    bound = half_spacing(np.abs(tiles / scale)) * scale * (1 + 2.0**-20) + np.abs(tiles) * 2.0**-22
    back = returned[:, :latent].double().unflatten(1, (-1, tile)).numpy()
    assert np.all(np.abs(back - tiles) <= bound)


@proves("F1")
@given(scaled, st.integers(1, 4))
def test_an_all_zero_tile_gives_zeros(fmt: Format, n: int) -> None:
    values = torch.zeros(n, fmt.width)
    values[1::2] = 1.0
    assert torch.equal(fmt.unpack(fmt.pack(values)), values)


# -- F1: bytes, made here from the definition of e4m3 and of the layout ------------------------------------


def _e4m3_magnitudes() -> Floats:
    """[127] what codes 0x00 … 0x7E stand for: 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal).astype(np.float32)


MAGNITUDES = _e4m3_magnitudes()


def e4m3(values: npt.NDArray[np.floating[Any]]) -> bytes:
    """The nearest code of each value, the even one of two."""
    magnitude = np.minimum(np.abs(values), MAGNITUDES[-1]).astype(np.float64)
    above = np.searchsorted(MAGNITUDES, magnitude).clip(1)
    below = above - 1
    down, up = magnitude - MAGNITUDES[below], MAGNITUDES[above] - magnitude
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return bytes((code | np.signbit(values) * 0x80).astype(np.uint8))


def scale_of(tile: Floats) -> np.float32:
    scale: np.float32 = np.maximum(np.abs(tile).max(), np.float32(1e-4)) / np.float32(448)
    return scale


def mla_bytes(row: Floats, latent: int, tile: int) -> bytes:
    """512 fp8, then 4 scales, then 64 bf16, in production sizes; ``row`` is exact in bf16."""
    tiles = row[:latent].reshape(-1, tile)
    scales = [scale_of(t) for t in tiles]
    elements = b"".join(e4m3(t / scale) for t, scale in zip(tiles, scales, strict=True))
    upper_halves = b"".join(struct.pack("<f", value)[2:] for value in row[latent:])
    return elements + struct.pack(f"<{len(scales)}f", *scales) + upper_halves


def pages_of(fmt: Format, page_size: int, count: int, seed: int) -> tuple[Floats, bytes]:
    """Values of all tokens of some pages, and the pages as they are written."""
    values = drawn(page_size * count, fmt.width, seed).bfloat16().float()
    pages = torch.full((count, fmt.page_bytes(page_size)), 255, dtype=torch.uint8)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    write_rows(pages, order, fmt.pack(values[order]), fmt)
    return values.numpy(), pages.numpy().tobytes()


@proves("F1")
@settings(max_examples=20)
@given(st.sampled_from(MLA_SIZES), st.sampled_from([1, 3, 64]), seeds)
def test_pages_of_mla_fp8_are_these_bytes(sizes: tuple[int, int, int], page_size: int, seed: int) -> None:
    latent, rope, tile = sizes
    fmt = mla_format("fp8", latent=latent, rope=rope, tile=tile)
    assert fmt.bytes_per_token == latent + 4 * latent // tile + 2 * rope
    values, written = pages_of(fmt, page_size, 2 if latent < 512 else 1, seed)
    assert written == b"".join(mla_bytes(row, latent, tile) for row in values)


@proves("F1")
@settings(max_examples=20)
@given(st.sampled_from(INDEX_SIZES), st.sampled_from([1, 3, 64]), seeds)
def test_pages_of_index_fp8_are_all_keys_then_all_scales(width: int, page_size: int, seed: int) -> None:
    fmt = index_format("fp8", width)
    assert fmt.bytes_per_token == width + 4
    values, written = pages_of(fmt, page_size, 2, seed)
    pages = []
    for page in values.reshape(2, page_size, width):
        scales = [scale_of(key) for key in page]
        pages.append(b"".join(e4m3(key / scale) for key, scale in zip(page, scales, strict=True)))
        pages.append(struct.pack(f"<{page_size}f", *scales))
    assert written == b"".join(pages)


def test_production_sizes_are_those_of_the_contract() -> None:
    mla, index = mla_format("fp8", latent=512, rope=64), index_format("fp8", 128)
    assert (mla.bytes_per_token, index.bytes_per_token, index.page_bytes(64)) == (656, 132, 8448)
    assert [mla_format(p, latent=512, rope=64).bytes_per_token // 576 for p in PRECISIONS[:3]] == [8, 4, 2]


# -- where rows lie ----------------------------------------------------------------------------------------


@proves("F1", "F2")
@given(st.sampled_from(FORMATS), st.sampled_from([1, 2, 3, 16]), st.integers(1, 4), seeds)
def test_rows_are_found_at_their_slots_and_nothing_else_changes(
    fmt: Format, page_size: int, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(count * page_size, generator=generator)[: 1 + seed % (count * page_size)]
    packed = torch.randint(256, (len(slots), fmt.bytes_per_token), dtype=torch.uint8, generator=generator)
    shape = (count, fmt.page_bytes(page_size))
    pages = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    # By hand: each field of each row to the byte that `byte_offsets` names, in 32-bit slots.
    flat = pages.flatten().clone()
    offsets = byte_offsets(slots.to(torch.int32), fmt, page_size)
    for row, starts in zip(packed, offsets.tolist(), strict=True):
        for part, start in zip(row.split(fmt.fields), starts, strict=True):
            flat[start : start + len(part)] = part
    write_rows(pages, slots, packed, fmt)
    assert torch.equal(pages.flatten(), flat)
    assert torch.equal(read_rows(pages, slots, fmt), packed)
    assert torch.equal(rows_of_pages(pages, fmt), read_rows(pages, torch.arange(count * page_size), fmt))
    assert torch.equal(rows_of_pages(pages, fmt)[slots], packed)


# The first slot of a page of index_fp8 that begins beyond 2³¹, and the last slot that 32 bits hold.
LARGE = near([254_201 * 64, 2**24, 2**31 - 2], at_least=0)


@proves("F2")
@given(st.sampled_from(PRODUCTION + FORMATS), st.sampled_from([1, 3, 64]), st.lists(LARGE, min_size=1))
def test_byte_offsets_are_exact_whatever_the_type_of_the_slots(
    fmt: Format, page_size: int, slots: list[int]
) -> None:
    expected = []
    for slot in slots:
        page, offset = divmod(slot, page_size)
        starts = [sum(fmt.fields[:i]) * page_size for i in range(len(fmt.fields))]
        expected.append(
            [
                page * fmt.bytes_per_token * page_size + start + offset * size
                for start, size in zip(starts, fmt.fields, strict=True)
            ]
        )
    for dtype in (torch.int32, torch.int64):
        offsets = byte_offsets(torch.tensor(slots, dtype=dtype), fmt, page_size)
        assert offsets.dtype == torch.int64
        assert offsets.tolist() == expected


@proves("F2")
@settings(max_examples=5)
@given(seeds)
def test_rows_beyond_two_gibibytes_are_where_their_offsets_say(seed: int) -> None:
    """In a cache of more than 2³¹ bytes, of which hardly any are ever touched."""
    fmt, page_size = index_format("fp8", 128), 64
    pages = torch.empty(254_203, fmt.page_bytes(page_size), dtype=torch.uint8)
    assert pages.nbytes > 2**31
    slots = torch.tensor([254_201 * 64, 254_202 * 64 + 63], dtype=torch.int32)
    packed = fmt.pack(drawn(2, 128, seed))
    write_rows(pages, slots, packed, fmt)
    flat = pages.view(-1)
    for row, (key, scale) in zip(packed, byte_offsets(slots, fmt, page_size).tolist(), strict=True):
        assert torch.equal(torch.cat([flat[key : key + 128], flat[scale : scale + 4]]), row)
    assert torch.equal(read_rows(pages, slots, fmt), packed)


# -- what is refused ---------------------------------------------------------------------------------------


def test_sizes_and_precisions_that_make_no_format_are_refused() -> None:
    with pytest.raises(InvalidInput, match="a multiple of the tile, 128"):
        mla_format("fp8", latent=500, rope=64)
    with pytest.raises(InvalidInput, match="expected one of f64, f32, bf16, fp8"):
        index_format("fp4", 128)
    with pytest.raises(InvalidInput, match="width of an index key"):
        index_format("f32", 0)
    with pytest.raises(InvalidInput, match="format index_fp8: expected one that has"):
        index_format("fp8", 8).require(torch.device("mps"))
    TAG.require(torch.device("mps"))
