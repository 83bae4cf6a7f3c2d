"""Sizes of a model: MLA, indexer, and how its numbers are scaled (laws A1, A4, A5).

The scale of attention comes from the dims of a head before absorption, never from the width of a KV row:

>>> DEEPSEEK_V32.width, round(DEEPSEEK_V32.sm_scale, 6), round(GLM_5.sm_scale, 6)
(576, 0.135234, 0.0625)
>>> round(DEEPSEEK_V32.sm_scale / (128 + 64) ** -0.5, 4)  # mscale² of YaRN's factor 40
1.8739
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from types import MappingProxyType

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least

_AT_LEAST = {"rope": 2, "index_rope": 0}  # of the other sizes: 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a layer stack of MLA and indexer, without the MLP: no token mixes there.

    YaRN enters through :attr:`sm_scale` only. Its blend of rotary frequencies is left out: it is the same
    function of the position on every rank.
    """

    vocab: int  # token ids 0 … vocab − 1
    hidden: int
    layers: int
    heads: int
    q_rank: int  # of the low-rank query
    latent: int  # dims of the compressed KV: the value of absorbed attention
    nope: int  # dims of a head without position
    rope: int  # rotated dims of a head; even
    value: int  # dims of a value head
    index_heads: int
    index_dim: int
    index_rope: int  # rotated dims at the front of an index head; even, 0 for none
    top_k: int  # keys that a row attends to
    quant_tile: int  # latent dims that share one fp8 scale
    rope_theta: float
    yarn_factor: float = 1.0  # context extension, 1 for none
    eps: float = 1e-6  # of the norms

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                at_least(
                    _AT_LEAST.get(field.name, 1), getattr(self, field.name), f"{field.name} of the model"
                )
        for name, low in (("rope_theta", 0.0), ("yarn_factor", 1.0), ("eps", 0.0)):
            _check_number(name, getattr(self, name), low)
        self._check_rotation()
        if self.latent % self.quant_tile:
            raise InvalidInput(
                "quant_tile of the model",
                expected=f"a divisor of the latent dims, {self.latent}",
                received=self.quant_tile,
            )

    def _check_rotation(self) -> None:
        for name in ("rope", "index_rope"):
            if getattr(self, name) % 2:
                raise InvalidInput(
                    f"{name} of the model",
                    expected="an even number: dims are rotated in pairs",
                    received=getattr(self, name),
                )
        if self.index_rope > self.index_dim:
            raise InvalidInput(
                "index_rope of the model",
                expected=f"at most the index dims, {self.index_dim}",
                received=self.index_rope,
            )

    @property
    def width(self) -> int:
        """Elements of a KV row and of an absorbed query head: latent, then rope."""
        return self.latent + self.rope

    @property
    def sm_scale(self) -> float:
        """(nope + rope)^−0.5 · mscale², mscale = 0.1 · ln(yarn_factor) + 1."""
        mscale = 0.1 * math.log(self.yarn_factor) + 1
        return float((self.nope + self.rope) ** -0.5 * mscale**2)


def _check_number(name: str, value: float, low: float) -> None:
    """A finite number above ``low``; YaRN's factor may be at its bound."""
    if not math.isfinite(value) or value < low or value == 0:
        raise InvalidInput(
            f"{name} of the model",
            expected=f"a finite number {'>=' if low else '>'} {low:g}",
            received=value,
        )


TINY = ModelShape(
    vocab=64,
    hidden=32,
    layers=2,
    heads=2,
    q_rank=14,
    latent=16,
    nope=6,
    rope=4,
    value=5,
    index_heads=3,
    index_dim=8,
    index_rope=6,
    top_k=12,
    quant_tile=8,
    rope_theta=10_000.0,
    yarn_factor=2.0,
)
"""Small enough to run by the thousand; axes that meet in an operation differ, so that a mix-up shows."""

DEEPSEEK_V32 = ModelShape(
    vocab=129_280,
    hidden=7168,
    layers=61,
    heads=128,
    q_rank=1536,
    latent=512,
    nope=128,
    rope=64,
    value=128,
    index_heads=64,
    index_dim=128,
    index_rope=64,
    top_k=2048,
    quant_tile=128,
    rope_theta=10_000.0,
    yarn_factor=40.0,
)
"""Sizes from the model card of DeepSeek-V3.2; for checks of single layers, not for running the model."""

GLM_5 = ModelShape(
    vocab=154_880,
    hidden=6144,
    layers=78,
    heads=64,
    q_rank=2048,
    latent=512,
    nope=192,
    rope=64,
    value=256,
    index_heads=32,
    index_dim=128,
    index_rope=64,
    top_k=2048,
    quant_tile=128,
    rope_theta=1_000_000.0,
    eps=1e-5,
)
"""Sizes from the model card of GLM-5; for checks of single layers, not for running the model."""

PRESETS = MappingProxyType({"tiny": TINY, "deepseek-v3.2": DEEPSEEK_V32, "glm-5": GLM_5})
