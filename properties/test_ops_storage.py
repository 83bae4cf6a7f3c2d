"""Operations of :mod:`refmodel.ops.storage` and fp8, against bytes that are placed one token at a time."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.kernels.adversaries import offsets
from properties.kernels.cases.quantize import QuantizeIndex, QuantizeMla
from properties.kernels.cases.storage import IndexRead, IndexWrite, Materialize, MlaRead, MlaWrite
from properties.proofs import proves
from refmodel.errors import Finding
from refmodel.ops import placing
from refmodel.ops.quantize import QUANTIZE_INDEX, QUANTIZE_MLA
from refmodel.ops.storage import INDEX_READ, INDEX_WRITE, MLA_READ, MLA_WRITE

Bytes = npt.NDArray[np.uint8]
Arguments = dict[str, Any]


def as_numpy(tensor: torch.Tensor) -> Bytes:
    """Its bytes, [rows, bytes]."""
    numbers: Bytes = tensor.contiguous().view(torch.uint8).numpy()
    return numbers


# -- bytes -------------------------------------------------------------------------------------------------


@proves("V1", "V2", "V7", "O1")
@given(Materialize.strategy())
def test_a_row_of_the_view_is_read_where_its_owner_keeps_it(case: Materialize) -> None:
    given_ = case.arguments()
    shards, table = given_["shards"].numpy(), given_["page_table"].tolist()
    wanted = []
    for request, tokens in enumerate(case.valid):
        for position in range(tokens):
            page, offset = table[request][position // case.page], position % case.page
            stored = bytes(shards[page % case.world, page // case.world])
            row, start = b"", 0
            for size in case.fields:
                row += stored[start + offset * size : start + (offset + 1) * size]
                start += case.page * size
            wanted.append(row)
    (view,) = case.op.reference(**given_)
    assert [bytes(row) for row in view.numpy()] == wanted


@proves("V2", "O3")
@given(Materialize.strategy(), st.integers(0, 255))
def test_a_view_is_made_of_tokens_only(case: Materialize, other: int) -> None:
    """With any other byte in tails, on pages of nobody and in dummy pages, the view is the same."""
    given_ = case.arguments()
    (view,) = case.op.reference(**given_)
    poisoned = given_["shards"].clone()
    used = torch.zeros_like(poisoned, dtype=torch.bool)
    for request, tokens in enumerate(case.valid):
        for position in range(tokens):
            page, offset = int(given_["page_table"][request, position // case.page]), position % case.page
            start = 0
            for size in case.fields:
                used[page % case.world, page // case.world, start + offset * size :][:size] = True
                start += case.page * size
    poisoned[~used] = other
    (again,) = case.op.reference(**{**given_, "shards": poisoned})
    assert torch.equal(view, again)


@proves("O3", "F1")
@given(MlaWrite.strategy())
def test_rows_of_mla_are_written_at_their_slots_and_nowhere_else(case: MlaWrite) -> None:
    given_ = case.arguments()
    wanted = as_numpy(given_["cache"]).copy()
    for slot, row in zip(given_["slots"].tolist(), as_numpy(given_["rows"]), strict=True):
        if slot != -1:
            wanted[slot] = row
    MLA_WRITE.reference(**given_)
    assert np.array_equal(as_numpy(given_["cache"]), wanted)


@proves("F1")
@given(MlaRead.strategy())
def test_rows_of_mla_are_read_at_their_slots(case: MlaRead) -> None:
    given_ = case.arguments()
    stored = as_numpy(given_["cache"])
    (rows,) = MLA_READ.reference(**given_)
    assert as_numpy(rows).tolist() == [stored[slot].tolist() for slot in given_["slots"].tolist()]


@proves("O3", "F1", "F2")
@given(IndexWrite.strategy())
def test_keys_and_scales_are_written_apart_and_nothing_else_is(case: IndexWrite) -> None:
    given_ = case.arguments()
    flat = bytearray(given_["pages"].numpy().tobytes())
    keys, scales = given_["keys"].numpy(), given_["scales"].tolist()
    for slot, key, scale in zip(given_["slots"].tolist(), keys, scales, strict=True):
        if slot != -1:
            key_at, scale_at = _index_bytes(slot, case.page, case.dim)
            flat[key_at : key_at + case.dim] = key.tobytes()
            flat[scale_at : scale_at + 4] = struct.pack("<f", scale)
    INDEX_WRITE.reference(**given_)
    assert given_["pages"].numpy().tobytes() == bytes(flat)


@proves("F1", "F2")
@given(IndexRead.strategy())
def test_keys_and_scales_are_read_apart(case: IndexRead) -> None:
    given_ = case.arguments()
    flat = given_["pages"].numpy().tobytes()
    keys, scales = INDEX_READ.reference(**given_)
    for row, slot in enumerate(given_["slots"].tolist()):
        key_at, scale_at = _index_bytes(slot, case.page, case.dim)
        assert bytes(keys[row].tolist()) == flat[key_at : key_at + case.dim]
        assert struct.pack("<f", float(scales[row])) == flat[scale_at : scale_at + 4]


def _index_bytes(slot: int, page_size: int, dim: int) -> tuple[int, int]:
    """Where a slot's key and its scale begin: all keys of a page, then all its scales."""
    page_start = slot // page_size * page_size * (dim + 4)
    offset = slot % page_size
    return page_start + offset * dim, page_start + page_size * dim + 4 * offset


# -- fp8 ---------------------------------------------------------------------------------------------------


def _e4m3() -> npt.NDArray[np.float64]:
    """[256] what each byte stands for: a sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[[0x7F, 0xFF]] = np.nan
    return np.where(code < 128, magnitude, -magnitude)


E4M3 = _e4m3()
NUMBERS = E4M3[~np.isnan(E4M3)]


def assert_quantized(values: torch.Tensor, elements: Bytes, scales: npt.NDArray[np.float32]) -> None:
    """[n, tile] values, their bytes, [n] scales: no fp8 number is nearer, save for what fp32 loses."""
    exact = values.double().numpy()
    amax = np.maximum(np.abs(exact).max(1), 1e-4)
    assert np.all(np.abs(scales - amax / 448) <= np.spacing(scales))
    quotient = exact / scales.astype(np.float64)[:, None]
    distance = np.abs(E4M3[elements] - quotient)
    nearest = np.abs(NUMBERS - quotient[..., None]).min(-1)
    assert np.all(distance <= nearest + np.abs(quotient) * 2.0**-23)
    assert not np.any(E4M3[elements][exact == 0])


@proves("F1")
@given(QuantizeIndex.strategy())
def test_keys_become_the_nearest_fp8_at_their_scale(case: QuantizeIndex) -> None:
    keys = case.arguments()["keys"]
    elements, scales = QUANTIZE_INDEX.reference(keys)
    if len(keys):
        assert_quantized(keys, elements.numpy(), scales.numpy())


@proves("F1")
@given(QuantizeMla.strategy())
def test_rows_become_fp8_tiles_their_scales_and_rope(case: QuantizeMla) -> None:
    given_ = case.arguments()
    (packed,) = QUANTIZE_MLA.reference(**given_)
    for row, stored in zip(given_["rows"], packed.numpy(), strict=True):
        elements, rest = stored[: case.latent], stored[case.latent :].tobytes()
        tiles = case.latent // case.tile
        scales = np.frombuffer(rest[: 4 * tiles], np.float32)
        latent = row[: case.latent].view(tiles, case.tile)
        assert_quantized(latent, elements.reshape(tiles, case.tile), scales)
        rope = row[case.latent :].float().tolist()
        assert rest[4 * tiles :] == b"".join(_rounded_to_bf16(value) for value in rope)


def _rounded_to_bf16(value: float) -> bytes:
    """The upper half of fp32, rounded to nearest, to even from the middle."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


# -- judges ------------------------------------------------------------------------------------------------


def by_reciprocals(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Right, and not the reference: multiplies where that divides."""
    amax = keys.float().abs().amax(-1).clamp(min=1e-4)
    scales = amax * torch.tensor(1 / 448, dtype=torch.float32)
    quotient = keys.float() * scales.reciprocal()[:, None]
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales


def judged_keys(keys: torch.Tensor, received: tuple[torch.Tensor, ...]) -> Finding | None:
    return QUANTIZE_INDEX.judge({"keys": keys}, received, QUANTIZE_INDEX.reference(keys))


@proves("F1")
@given(QuantizeIndex.strategy())
def test_a_right_quantizer_of_another_kind_is_right(case: QuantizeIndex) -> None:
    keys = case.arguments()["keys"]
    assert judged_keys(keys, by_reciprocals(keys)) is None


@proves("F1")
@given(QuantizeIndex.strategy(), st.data())
def test_one_element_two_steps_off_is_found(case: QuantizeIndex, data: st.DataObject) -> None:
    keys = case.arguments()["keys"]
    elements, scales = QUANTIZE_INDEX.reference(keys)
    if not elements.numel():
        return
    place = data.draw(st.integers(0, elements.numel() - 1))
    code = elements.clone()
    flat = code.view(-1)
    magnitude = int(flat[place]) & 0x7F
    flat[place] = (int(flat[place]) & 0x80) | (magnitude - 2 if magnitude > 100 else magnitude + 2)
    found = judged_keys(keys, (code, scales))
    assert found is not None
    assert f"element {place % case.dim} of tile 0 of row {place // case.dim}" in found.what


@proves("F1")
@given(QuantizeIndex.strategy(), st.sampled_from([-4, 4]), st.data())
def test_one_scale_four_units_off_is_found(case: QuantizeIndex, units: int, data: st.DataObject) -> None:
    keys = case.arguments()["keys"]
    elements, scales = QUANTIZE_INDEX.reference(keys)
    if not len(keys):
        return
    row = data.draw(st.integers(0, len(keys) - 1))
    off = scales.clone()
    off[row] = torch.nan if data.draw(st.booleans()) else off[row] * (1 + units * 2.0**-23)
    found = judged_keys(keys, (elements, off))
    assert found is not None
    assert found.what == f"scale of tile 0 of row {row}"


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (MlaWrite(num_slots=128, rows=30, width=576), offsets.write_offsets_in_12_bits),
        (MlaRead(num_slots=128, rows=70, width=576), offsets.read_offsets_in_12_bits),
        (IndexWrite(page=64, local_pages=3, rows=100, dim=128), offsets.index_write_offsets_in_12_bits),
        (IndexRead(page=64, local_pages=3, rows=100, dim=128), offsets.index_read_offsets_in_12_bits),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
@proves("F2")
def test_bytes_that_are_missing_where_offsets_need_more_bits_break_f2(
    case: Any, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line drawn at 2¹², where these kernels wrap, and not at 2³¹."""
    op = case.op
    received, expected = case.arguments(), case.arguments()
    results = wrong(**received)
    outcomes = [
        op.outcome(
            received, () if results is None else results if isinstance(results, tuple) else (results,)
        ),
        op.outcome(expected, op.reference(**expected)),
    ]
    found = op.judge(case.arguments(), *outcomes)
    assert found is not None
    assert found.law == "F1"
    monkeypatch.setattr(placing, "_REACH", 1 << 12)
    found = op.judge(case.arguments(), *outcomes)
    assert found is not None
    assert found.law == "F2"
