"""Row formats: what one token's row is made of, and the poison of a slot that nobody wrote.

>>> row_format("tag").poison_rows(1).tolist() == [[POISON_TAG]]
True
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least
from refmodel.storage.identity import PADDING_TAG, POISON_TAG, contents


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The rows of one cache, [n, width] of ``dtype``."""

    name: str
    dtype: torch.dtype
    width: int  # elements a token

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize

    def encode(self, tags: torch.Tensor) -> torch.Tensor:
        """The rows [n, width] of identities [n]; padding rows of a batch become what must never be read."""
        if self.name == "tag":
            return tags[:, None]
        rows = contents(tags, self.width, self.dtype)
        return torch.where((tags == PADDING_TAG)[:, None], torch.nan, rows)

    def poison_rows(self, rows: int, poison: float | int | None = None) -> torch.Tensor:
        """[rows, width] of poison: an impossible tag, NaN in floats, or the value given (V2, O3)."""
        default = POISON_TAG if self.name == "tag" else torch.nan
        return torch.full((rows, self.width), default if poison is None else poison, dtype=self.dtype)


_DTYPES = {"tag": torch.int64, "f32": torch.float32, "f64": torch.float64}
FORMATS = tuple(_DTYPES)


def row_format(name: str, width: int = 1) -> RowFormat:
    """``tag`` (int64 identities, width 1), ``f32`` or ``f64`` (plain rows of ``width`` elements)."""
    if name not in _DTYPES:
        raise InvalidInput("row format", expected=f"one of {', '.join(FORMATS)}", received=name)
    if name == "tag" and width != 1:
        raise InvalidInput("width of format tag", expected="1", received=width)
    return RowFormat(name, _DTYPES[name], at_least(1, width, "width of a row"))
