"""Which keys each row may see: a contiguous range of the flattened K (law S6), input of laws A1 and A2.

>>> ranges = key_ranges(torch.tensor([0, 3]), torch.tensor([2, 4]), num_keys=5)
>>> ranges.visible().int().tolist()
[[1, 1, 0, 0, 0], [0, 0, 0, 1, 0]]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.errors import InvalidInput


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """Row i sees rows ks[i] … ke[i] − 1 of the flattened K.

    :func:`key_ranges` makes and checks it, once a forward, on the CPU; from then on nothing looks at its
    contents, so that nothing waits for the device (S7).
    """

    ks: torch.Tensor  # [rows] int64
    ke: torch.Tensor  # [rows] int64, exclusive
    num_keys: int  # rows of the flattened K

    def __len__(self) -> int:
        return self.ks.shape[0]

    def __getitem__(self, rows: slice) -> KeyRanges:
        return KeyRanges(self.ks[rows], self.ke[rows], self.num_keys)

    def to(self, device: torch.device | str) -> KeyRanges:
        """The same ranges on another device."""
        return KeyRanges(self.ks.to(device), self.ke.to(device), self.num_keys)

    @property
    def lengths(self) -> torch.Tensor:
        """[rows] keys that each row sees, L."""
        return self.ke - self.ks

    def visible(self) -> torch.Tensor:
        """[rows, num_keys] bool."""
        columns = torch.arange(self.num_keys, device=self.ks.device)
        return (columns >= self.ks[:, None]) & (columns < self.ke[:, None])

    def require(self, rows: int, keys: int, what: str) -> None:
        """:class:`InvalidInput` unless there is a range for each of ``rows`` rows, over ``keys`` keys."""
        if (len(self), self.num_keys) != (rows, keys):
            raise InvalidInput(
                f"ranges of {what}",
                expected=f"{rows} rows over {keys} keys",
                received=f"{len(self)} rows over {self.num_keys} keys",
                fix="Cut rows and their metadata by the same segment lengths (S5).",
            )


def key_ranges(ks: torch.Tensor, ke: torch.Tensor, num_keys: int) -> KeyRanges:
    """Ranges [rows] int64 over ``num_keys`` keys; ks = ke sees nothing, as padding rows do (S9).

    :class:`InvalidInput` unless both have one length and type int64, and 0 ≤ ks ≤ ke ≤ num_keys.
    """
    if ks.shape != ke.shape or ks.dim() != 1 or {ks.dtype, ke.dtype} != {torch.int64}:
        raise InvalidInput(
            "ks and ke",
            expected="int64 [rows] each, of one length",
            received=f"{ks.dtype} {list(ks.shape)} and {ke.dtype} {list(ke.shape)}",
        )
    wrong = (ks < 0) | (ke < ks) | (ke > num_keys)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise InvalidInput(
            f"keys of row {row}",
            expected=f"0 ≤ ks ≤ ke ≤ {num_keys}",
            received=f"ks {int(ks[row])}, ke {int(ke[row])}",
        )
    return KeyRanges(ks, ke, num_keys)
