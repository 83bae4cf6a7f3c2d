"""Sizes of MLA's attention in its absorbed form, of which law A4 is the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from refmodel.layout.geometry import at_least


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Sizes of the attention; DeepSeek-V3.2 has 128 heads, 512 latent and 64 rope dims."""

    heads: int
    latent: int
    rope: int

    def __post_init__(self) -> None:
        for name in ("heads", "latent", "rope"):
            at_least(1, getattr(self, name), f"{name} of MLA")

    @property
    def width(self) -> int:
        """Elements of a KV row and of a query head."""
        return self.latent + self.rope
