"""From queries and a view to attention's output: choose keys, name them, attend (laws A1–A4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from refmodel.attention.indexer import choose, mqa_logits
from refmodel.attention.ranges import KeyRanges
from refmodel.attention.sparse import Attended, Chosen, sparse_mla
from refmodel.attention.transform import Addressing, Transform
from refmodel.model.batch import HalfRows
from refmodel.model.layer import Projected
from refmodel.model.model import Model
from refmodel.storage.codecs import quantize
from refmodel.storage.identity import Cache
from refmodel.storage.view import CompactTable

Views = Mapping[Cache, torch.Tensor]

# Elements of a temporary: a tenth of a gigabyte on a CPU, a few on a GPU.
_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 29}


def choose_keys(projected: Projected, views: Views, ranges: KeyRanges, model: Model) -> torch.Tensor:
    """Positions [rows, top_k] of the keys that each row's indexer chose, in its request; −1 behind (A2)."""
    q, keys, scale, weights = indexer_inputs(projected, views, model)
    return choose(q, keys, scale, weights, ranges, model.shape.top_k, chunk_elements=chunk_elements(model))


def index_logits(projected: Projected, views: Views, ranges: KeyRanges, model: Model) -> torch.Tensor:
    """The logits [rows, keys] by which :func:`choose_keys` chooses, all at once (A1)."""
    return mqa_logits(*indexer_inputs(projected, views, model), ranges)


def indexer_inputs(
    projected: Projected, views: Views, model: Model
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(q, keys, scales of the keys or None, weights of the heads), of queries and packed index rows."""
    keys, scale = model.formats[Cache.INDEX].keys_and_scales(views[Cache.INDEX])
    q, weights = projected.index_q, projected.index_weights
    if scale is not None:
        q, weights = quantized_query(q, weights)
    return q, keys, scale, weights


def quantized_query(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where keys are fp8 the query is too: one scale a row and head, which goes into the head's weight."""
    elements, scale = quantize(q)
    return elements.to(torch.float32), weights.to(torch.float32) * scale.squeeze(-1)


def attend(projected: Projected, views: Views, view_rows: torch.Tensor, model: Model) -> Attended:
    """Sparse MLA over the chosen rows [rows, top_k] of the view, in the accumulating type (A4)."""
    kv = model.formats[Cache.KV].unpack(views[Cache.KV])
    return sparse_mla(
        projected.q,
        kv,
        Chosen(view_rows, len(kv)),
        latent=model.shape.latent,
        sm_scale=model.shape.sm_scale,
        chunk_elements=chunk_elements(model),
    )


def choose_rows(
    projected: Projected, views: Views, half: HalfRows, compact: Sequence[CompactTable], model: Model
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that each row of a half chose: (positions in its request, rows of the view), [rows, top_k]."""
    positions = choose_keys(projected, views, half.ranges, model)
    indices = half.addressing.transform(positions, model.transform)
    return positions, rows_of_view(indices, half.addressing, compact, model.transform)


def rows_of_view(
    indices: torch.Tensor, addressing: Addressing, compact: Sequence[CompactTable], made: Transform
) -> torch.Tensor:
    """Transformed choices [rows, k] → rows of the view: RAGGED are, of PAGED the slots are looked up (A3)."""
    if made is Transform.RAGGED:
        return indices
    rows = torch.full_like(indices, -1)
    for table, (start, stop) in zip(compact, pairwise(addressing.cu_seqlens_q), strict=True):
        rows[start:stop] = table.rows_of(indices[start:stop])
    return rows


def chunk_elements(model: Model) -> int:
    """How large a temporary may be, on the device of the arithmetic."""
    return _CHUNK[model.device.type]
