"""Formats: what one token is in a cache, in bytes (law F1).

| format | bytes a token, in production sizes |
|---|---|
| ``tag`` | 8: the int64 identity of the token, for provenance |
| ``mla_f64``, ``mla_f32``, ``mla_bf16`` | 576 elements: 512 latent, 64 rope |
| ``mla_fp8`` | 656: 512 fp8, 4 fp32 scales, 64 bf16 rope |
| ``index_f64``, ``index_f32``, ``index_bf16`` | 128 elements |
| ``index_fp8`` | 132: 128 fp8, 1 fp32 scale; a page holds all its keys, then all its scales |

>>> mla_format("fp8", latent=512, rope=64).bytes_per_token, index_format("fp8", 128).page_bytes(64)
(656, 8448)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least
from refmodel.storage.codecs import Codec, Plain, ScaledKey, ScaledLatent
from refmodel.storage.identity import PADDING_TAG, POISON_TAG, contents

PRECISIONS = ("f64", "f32", "bf16", "fp8")
TILE = 128  # latent elements a scale, in production

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
_FP8_DEVICES = ("cpu", "cuda", "meta")
_NAN_BYTE = 0xFF  # of which all are, a float of any format is NaN


@dataclass(frozen=True, slots=True)
class Format:
    """One cache's rows. *Packed* rows are uint8 [n, bytes_per_token], *values* are [n, width]."""

    name: str
    width: int  # values a token
    codec: Codec

    @property
    def fields(self) -> tuple[int, ...]:
        """Bytes a token of each field: a page holds field 0 of its tokens, then field 1, …"""
        return self.codec.fields

    @property
    def bytes_per_token(self) -> int:
        return sum(self.fields)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` slots."""
        return page_size * self.bytes_per_token

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Values [n, width] → packed rows [n, bytes_per_token], each element rounded once."""
        return self.codec.pack(values)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed rows → values [n, width]; fp8 with its scales multiplied in, fp32."""
        return self.codec.unpack(packed)

    def keys_and_scales(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Index rows as the indexer takes them: keys [n, width], and scales [n] where there are any (A1)."""
        if isinstance(self.codec, ScaledKey):
            return self.codec.parts(packed)
        return self.unpack(packed), None

    def encode(self, tags: torch.Tensor) -> torch.Tensor:
        """The packed rows of identities [n]; a padding row of a batch becomes what must never be read."""
        if self.name == "tag":
            return self.pack(tags[:, None])
        rows = contents(tags, self.width, torch.float64)
        return self.pack(torch.where((tags == PADDING_TAG)[:, None], torch.nan, rows))

    def poison_bytes(self, count: int, poison: int | None = None) -> torch.Tensor:
        """Bytes [count] that nobody wrote: an impossible tag, NaN in floats, or the byte given (V2, O3)."""
        default = POISON_TAG & 0xFF if self.name == "tag" else _NAN_BYTE
        return torch.full((count,), default if poison is None else poison, dtype=torch.uint8)

    def require(self, device: torch.device) -> None:
        """:class:`InvalidInput` if the device lacks the element type."""
        if self.name.endswith("fp8") and device.type not in _FP8_DEVICES:
            raise InvalidInput(
                f"device of format {self.name}",
                expected=f"one that has {torch.float8_e4m3fn}: {', '.join(_FP8_DEVICES[:2])}",
                received=device,
            )


TAG = Format("tag", 1, Plain(torch.int64, 1))


def mla_format(precision: str, *, latent: int, rope: int, tile: int = TILE) -> Format:
    """The format of MLA KV. ``tile``: latent elements a scale, of fp8 only; it must divide ``latent``."""
    width = at_least(1, latent, "latent width") + at_least(0, rope, "rope width")
    if _known(precision) == "fp8":
        return Format("mla_fp8", width, ScaledLatent(latent, rope, at_least(1, tile, "tile of a scale")))
    return Format(f"mla_{precision}", width, Plain(_DTYPES[precision], width))


def index_format(precision: str, width: int) -> Format:
    """The format of index keys of ``width`` elements; fp8 has one scale a token."""
    at_least(1, width, "width of an index key")
    codec = ScaledKey(width) if _known(precision) == "fp8" else Plain(_DTYPES[precision], width)
    return Format(f"index_{precision}", width, codec)


def _known(precision: str) -> str:
    if precision not in PRECISIONS:
        raise InvalidInput("precision", expected=f"one of {', '.join(PRECISIONS)}", received=precision)
    return precision
