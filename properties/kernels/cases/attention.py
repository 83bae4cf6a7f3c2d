"""Cases of the operations in :mod:`refmodel.ops.attention`, in which a single key shows (law A5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case
from properties.kernels.cases.query_rows import QueryRows, query_rows
from properties.kernels.cases.values import TYPES, filled, mla_parts
from properties.telling import SCORE_DROP, MlaShape, telling_inputs
from refmodel.attention.accumulating import accumulating_type
from refmodel.ops.attention import LSE_MERGE, MQA_LOGITS, SPARSE_MLA
from refmodel.ops.op import Op

FLOATS = ("f32", "bf16", "f64")
LOGIT_TYPES = ("f32", "bf16", "f64", "fp8")


def _odd(most: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Odd integers from −most to most: none is 0."""
    drawn = torch.randint(0, most + 1, shape, generator=generator)
    return (2 * drawn - most).double()


def _telling(count: int, generator: torch.Generator) -> torch.Tensor:
    """[count] between 1 and 2 of either sign: each shows in a sum."""
    return (1 + torch.rand(count, generator=generator)) * _odd(1, (count,), generator)


@st.composite
def _mqa_logits(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a case."""
    heads, dim = draw(st.integers(1, 4)), draw(st.sampled_from([4, 1, 16, 33]))
    return dict(heads=heads, dim=dim, dtype=draw(st.sampled_from(LOGIT_TYPES)), **draw(query_rows()))


@dataclass(frozen=True, kw_only=True)
class MqaLogits(QueryRows):
    """Small integers and powers of two: sums are exact in any order, even where fp8 is summed in 14 bits.

    So any other logit is wrong. Dots need more than the 8 bits of bf16. Keys that no row sees are NaN.
    """

    op: ClassVar[Op] = MQA_LOGITS

    heads: int
    dim: int
    dtype: str = "f32"  # of q and keys

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        ranges, dtype = self.ranges(), TYPES[self.dtype]
        q = _odd(7, (self.rows, self.heads, self.dim), generator)
        keys = _odd(15, (ranges.num_keys, self.dim), generator)
        scale = 2.0 ** torch.randint(-3, 4, (ranges.num_keys,), generator=generator)
        weights = _odd(7, (self.rows, self.heads), generator) / 8
        unseen = ~ranges.visible().any(0)
        keys[unseen] = torch.nan
        scale[unseen] = torch.nan
        return {
            "q": q.to(dtype),
            "keys": keys.to(dtype),
            "scale": scale.float(),
            "weights": weights.to(accumulating_type(q.to(dtype))),
            "ks": ranges.ks,
            "ke": ranges.ke,
        }

    @classmethod
    def corners(cls) -> Iterator[Self]:
        small: dict[str, Any] = {"heads": 2, "dim": 4}
        yield cls(prefixes=(5,), tokens=(0,), **small)
        yield cls(prefixes=(0,), tokens=(1,), **small)
        yield cls(prefixes=(0,), tokens=(0,), padding=2, **small)
        yield cls(prefixes=(3, 0, 4), tokens=(2, 3, 0), behind=2, padding=1, **small)
        for dtype in LOGIT_TYPES:
            yield cls(prefixes=(70, 0), tokens=(3, 2), behind=7, heads=3, dim=16, dtype=dtype)
        for dtype in ("fp8", "bf16"):
            yield cls(prefixes=(2046, 130), tokens=(3, 2), behind=1, heads=64, dim=128, dtype=dtype)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return _mqa_logits().map(lambda fields: cls(**fields))

    @classmethod
    def huge(cls) -> Self:
        """Logits of more than 2³¹ bytes."""
        return cls(prefixes=(57_400,), tokens=(8200,), heads=1, dim=4, dtype="bf16")


@st.composite
def _sparse_mla(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a case: keys no more than there are codes for."""
    tile = draw(st.sampled_from([4, 2, 8, 16]))
    counts = draw(st.lists(st.integers(0, min(tile**2, 40)), max_size=4))
    most = max(counts, default=0)
    return {
        "counts": tuple(counts),
        "keys": most + draw(st.integers(0, 20)),
        "k": max(1, most + draw(st.integers(0, 5))),
        "heads": draw(st.integers(1, 3)),
        "tiles": draw(st.integers(3, 4)),
        "tile": tile,
        "rope": draw(st.sampled_from([2, 1, 8])),
        "dtype": draw(st.sampled_from(FLOATS)),
        "gaps": draw(st.integers(0, 1)),
        "level": draw(st.sampled_from([-SCORE_DROP, 96.0])),
        "sm_scale": draw(st.sampled_from([0.125, 192**-0.5])),
        "seed": draw(st.integers(0, 2**16)),
    }


@dataclass(frozen=True, kw_only=True)
class SparseMla(Case):
    """Row i attends to the first ``counts[i]`` of telling keys, which lie scattered in ``kv``.

    The other rows of ``kv`` are NaN. Of any first keys nearly all outputs cancel, so one more or less shows.
    """

    op: ClassVar[Op] = SPARSE_MLA

    counts: tuple[int, ...]  # keys of each row
    keys: int  # rows of kv, at least as many
    k: int  # width of the choice, at least as many
    heads: int
    tiles: int  # of the latent part: one makes the scores, two or more tell the keys
    tile: int
    rope: int
    dtype: str = "f32"
    gaps: int = 1  # 1: −1 anywhere in a row, 0: behind its keys only
    level: float = -SCORE_DROP  # about what all scores are; of 96 the exponential overflows float32
    sm_scale: float = 0.125

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        latent, dtype = self.tiles * self.tile, TYPES[self.dtype]
        shape = MlaShape(self.heads, latent, self.rope)
        attended = max(self.counts, default=0)
        told = telling_inputs(
            len(self.counts), max(1, attended), shape, tile=self.tile, sm_scale=self.sm_scale, seed=self.seed
        )
        told.q[..., -1] *= self.level / -SCORE_DROP
        places = torch.randperm(self.keys, generator=generator)[:attended]
        kv = torch.full((self.keys, shape.width), torch.nan, dtype=dtype)
        kv[places] = told.kv[:attended].to(dtype)
        chosen = torch.full((len(self.counts), self.k), -1)
        for row, count in zip(chosen, self.counts, strict=True):
            entries = torch.randperm(self.k if self.gaps else count, generator=generator)[:count]
            row[entries] = places[:count]
        return {
            "q": told.q.to(dtype),
            "kv": kv,
            "chosen": chosen,
            "latent": latent,
            "sm_scale": self.sm_scale,
        }

    @property
    def row_width(self) -> int:
        return self.tiles * self.tile + self.rope

    def with_width(self, width: int) -> Self | None:
        parts = mla_parts(width)
        if parts is None or max(self.counts, default=0) > parts[0] ** 2:  # no more keys than there are codes
            return None
        return replace(self, tiles=4, tile=parts[0], rope=parts[1])

    @classmethod
    def corners(cls) -> Iterator[Self]:
        small: dict[str, Any] = {"heads": 2, "tiles": 3, "tile": 4, "rope": 2}
        yield cls(counts=(), keys=3, k=2, **small)
        yield cls(counts=(1,), keys=1, k=1, **small)
        yield cls(counts=(0, 0), keys=0, k=2, **small)
        yield cls(counts=(0, 2), keys=5, k=3, **small)
        for dtype in FLOATS:
            yield cls(counts=(7, 0, 16, 3), keys=21, k=16, dtype=dtype, **small)
            yield cls(counts=(5, 1, 8), keys=40, k=8, dtype=dtype, level=96.0, gaps=0, **small)
        production: dict[str, Any] = {"tiles": 4, "tile": 128, "rope": 64, "sm_scale": 192**-0.5}
        yield cls(counts=(300,), keys=500, k=512, heads=2, **production)
        yield cls(counts=(2048, 65, 0), keys=4000, k=2048, heads=4, dtype="bf16", **production)
        yield cls(counts=(1500,), keys=1500, k=2048, heads=16, dtype="bf16", gaps=0, **production)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return _sparse_mla().map(lambda fields: cls(**fields))

    @classmethod
    def large(cls) -> Self:
        """Some rows of a long prompt: all heads of a rank, and the keys that an indexer chooses."""
        latent: dict[str, Any] = {"tiles": 4, "tile": 128, "rope": 64, "sm_scale": 192**-0.5}
        return cls(counts=(2048,) * 512, keys=131_072, k=2048, heads=16, dtype="bf16", gaps=0, **latent)

    @classmethod
    def huge(cls) -> Self:
        """Rows of 1,152 bytes, some beyond 2³¹."""
        return cls(
            counts=(2048, 700), keys=2_000_000, k=2048, heads=4, tiles=4, tile=128, rope=64, dtype="bf16"
        )


@dataclass(frozen=True, kw_only=True)
class LseMerge(Case):
    """Parts of about the same weight. What a part without keys has for outputs is NaN."""

    op: ClassVar[Op] = LSE_MERGE

    parts: int
    rows: int
    heads: int
    latent: int
    dtype: str = "f32"  # of outs
    empty: int = 0  # every so many pairs of row and part has no keys; 1: all, 0: none
    level: int = 0  # about what every lse is; of 200 the exponential overflows float32
    spread: float = 1.0  # of the lse of the parts of a row; of 100 one part has all the weight

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.parts, self.rows, self.heads, self.latent)
        outs = filled(shape, lambda count: _telling(count, generator).to(TYPES[self.dtype]))
        lses = self.level + self.spread * (torch.rand(shape[:3], generator=generator) - 0.5).double()
        if self.empty:
            pair = torch.arange(self.rows) * self.parts + torch.arange(self.parts)[:, None]
            is_empty = pair % self.empty == 0
            lses[is_empty] = -torch.inf
            outs[is_empty] = torch.nan
        return {"outs": outs, "lses": lses.to(accumulating_type(outs))}

    @property
    def row_width(self) -> int:
        return self.latent

    def with_width(self, width: int) -> Self | None:
        return replace(self, latent=width)

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(parts=2, rows=0, heads=2, latent=4)
        yield cls(parts=1, rows=1, heads=1, latent=1)
        yield cls(parts=2, rows=1, heads=2, latent=4, empty=1)
        yield cls(parts=1, rows=3, heads=2, latent=4, empty=2)
        for dtype in FLOATS:
            yield cls(parts=3, rows=5, heads=2, latent=8, empty=4, dtype=dtype)
            yield cls(parts=4, rows=2, heads=2, latent=8, level=200, dtype=dtype)
            yield cls(parts=4, rows=2, heads=2, latent=8, level=-200, spread=100.0, dtype=dtype)
        yield cls(parts=8, rows=5, heads=16, latent=512, empty=3, dtype="bf16")

    @classmethod
    def huge(cls) -> Self:
        """Parts, and what they are merged to, of more than 2³¹ bytes each."""
        return cls(parts=2, rows=66_000, heads=16, latent=512, empty=3)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.builds(
            cls,
            parts=st.integers(1, 8),
            rows=st.integers(0, 5),
            heads=st.integers(1, 3),
            latent=st.sampled_from([4, 1, 16, 33]),
            dtype=st.sampled_from(FLOATS),
            empty=st.integers(0, 5),
            level=st.sampled_from([0, 200, -200]),
            spread=st.sampled_from([1.0, 0.0, 100.0]),
            seed=st.integers(0, 2**16),
        )
