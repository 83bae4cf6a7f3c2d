"""Somebody else's program: torch's own ring attention, unmodified, on lockstep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sim.lockstep.schedule import priority_changing, randomly
from sim.world import World

ring = pytest.importorskip(
    "torch.distributed.tensor.experimental._attention", reason="this torch has no ring attention"
)
if not hasattr(ring, "_templated_ring_attention"):
    pytest.skip("this torch has no templated ring attention", allow_module_level=True)

# [batch, heads, tokens, dim]. Divisible by 2·W for W = 2, 3, 4, 8, as torch requires.
SHAPE = (2, 3, 48, 16)


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of its sum of exponentials [batch, heads, tokens]."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(SHAPE, generator=generator) for _ in range(3))


def places(size: int, is_causal: bool) -> list[torch.Tensor]:
    """Of each rank the positions of its tokens: torch balances causal work by pairing first and last."""
    tokens = torch.arange(SHAPE[2])
    if not is_causal:
        return list(tokens.chunk(size))
    chunks = tokens.chunk(2 * size)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(size)]


def attend(group: dist.ProcessGroup, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    mine = places(group.size(), is_causal)[group.rank()]
    query, key, value = (tensor[:, :, mine] for tensor in inputs())
    result: Any = ring._templated_ring_attention(group, 2, dense, query, key, value, is_causal=is_causal)
    return result[0], result[1]


@pytest.fixture(params=["ALL_GATHER", "ALL_TO_ALL"])
def rotation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = pytest.importorskip(ring._templated_ring_attention.__module__)
    monkeypatch.setattr(attention._cp_options, "rotate_method", attention._RotateMethod[request.param])


@pytest.mark.usefixtures("rotation")
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_ring_attention_is_dense_attention(
    size: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = pytest.importorskip(ring._templated_ring_attention.__module__)
    monkeypatch.setattr(attention._cp_options, "enable_load_balance", is_causal)
    query, key, value = inputs()
    expected = dense(query, key, value, is_causal)

    for schedule in (randomly(1), priority_changing(2)):
        run = World.lockstep(size, schedule=schedule).execute(attend, is_causal)
        for mine, result in zip(places(size, is_causal), run.results, strict=True):
            for got, whole in zip(result, expected, strict=True):
                torch.testing.assert_close(
                    got.reshape(whole[:, :, mine].shape), whole[:, :, mine], rtol=1e-6, atol=1e-6
                )
        assert all(call.site.startswith("test_ring_attention.py:") for calls in run.ledgers for call in calls)
