"""Every law once: its number, one sentence, and the module that keeps it.

Formulas and worked numbers are in ``docs/laws.md``. Properties name the laws they prove, mutants the laws
they break; ``cpkv laws`` prints all three together.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from refmodel.errors import InvalidInput

SPLIT = "refmodel.layout.split"
PLAN = "refmodel.layout.plan"
OWNERSHIP = "refmodel.layout.ownership"
PLACEMENT = "refmodel.layout.placement"
SHARD = "refmodel.storage.shard"
WRITE = "refmodel.storage.write"
VIEW = "refmodel.storage.view"
COLLECTIVES = "refmodel.collectives"
REUSE = "refmodel.storage.reuse"
FORMATS = "refmodel.storage.formats"
PAGES = "refmodel.storage.pages"
INDEXER = "refmodel.attention.indexer"
TOPK = "refmodel.attention.topk"
TRANSFORM = "refmodel.attention.transform"
SPARSE = "refmodel.attention.sparse"
SHARDED = "refmodel.attention.sharded"
FORWARD = "refmodel.model.forward"
DRAFT = "refmodel.serving.draft"


@dataclass(frozen=True, slots=True)
class Law:
    """One law of the contract."""

    id: str
    statement: str
    home: str  # the module that keeps it


_ALL = (
    Law("S1", "The segments of a request partition its extent: no gap, no overlap.", SPLIT),
    Law(
        "S2",
        "Page-aligned: every page position has one compute rank, interior boundaries are absolute multiples "
        "of P, and the units of two ranks differ by at most 1.",
        SPLIT,
    ),
    Law(
        "S3",
        "Empty segments and ranks are normal; a short suffix keeps its actual pages: never padded, "
        "replicated, or split another way because it is short.",
        SPLIT,
    ),
    Law(
        "S4",
        "Taking, padding to max_rank_rows, gathering and reranging rows is the identity, bit for bit.",
        PLAN,
    ),
    Law("S5", "Local rows are cut into prev and next by segment lengths, never in half.", PLAN),
    Law("S6", "A row at position p sees keys [0, p] of its own request; the prefix counts once.", PLAN),
    Law(
        "S7",
        "In each half ke rises by 1 per row, so valid rows are a contiguous prefix whose length comes from "
        "metadata.",
        PLAN,
    ),
    Law("S8", "Whether CP runs, and which split, is a pure function of shared metadata.", SPLIT),
    Law(
        "S9",
        "Padding rows belong to no request, are split with the rest, write to their rank's dummy page, and "
        "change no real row.",
        PLAN,
    ),
    Law("O1", "Every non-dummy page has one owner, the same on every rank and for every cache.", OWNERSHIP),
    Law(
        "O2",
        "to_physical is the physical slot on the owner and −1 elsewhere: a bijection between valid logical "
        "slots and (rank, physical slot).",
        OWNERSHIP,
    ),
    Law("O3", "A rank writes only slots it owns; poison in every other slot survives.", SHARD),
    Law("O4", "Page k of an extent comes from the lane of the rank that computes it.", PLACEMENT),
    Law(
        "O5",
        "Direct write needs a page-aligned plan and every current slot on its compute rank, by shared "
        "metadata; otherwise all ranks take the gathered write, with a visible warning.",
        WRITE,
    ),
    Law("O6", "An extent of U page units adds at most ceil(U/W) pages to any lane.", PLACEMENT),
    Law(
        "V1",
        "The materialized view equals the replicated baseline, byte for byte, for every valid token in "
        "position order.",
        VIEW,
    ),
    Law("V2", "Slots past the valid length of a tail page are masked: they change no output bit.", VIEW),
    Law(
        "V3",
        "Current-only reuse: without a prefix the gathered current rows are the view, byte for byte, and "
        "nothing is materialized.",
        REUSE,
    ),
    Law(
        "V4",
        "Partial reuse: history from shards and current rows from the gathered tensor make the view, byte "
        "for byte, also when both lie in one page.",
        REUSE,
    ),
    Law(
        "V5",
        "Prefetching the next layer's history changes neither bytes nor the order of collectives.",
        REUSE,
    ),
    Law(
        "V6",
        "Every rank issues the same ordered list of collectives, also when it has no rows or pages.",
        COLLECTIVES,
    ),
    Law("V7", "Scrambling logical page ids changes no output bit.", VIEW),
    Law(
        "V8", "One view a layer: one gather for MLA KV and one for the index, shared by prev and next.", VIEW
    ),
    Law(
        "A1",
        "logit[m, n] is the sum over heads of w·relu(q·k)·scale for keys ks ≤ n < ke; what is outside does "
        "not matter.",
        INDEXER,
    ),
    Law(
        "A2",
        "Top-k of a row with no more than k keys is all of them in ascending order; else k of them such that "
        "no unchosen logit exceeds a chosen one. Then −1 up to width k.",
        TOPK,
    ),
    Law(
        "A3",
        "PAGED gives logical slots and builds no offsets; RAGGED gives rows of the flattened K. Undone, both "
        "choose the same tokens.",
        TRANSFORM,
    ),
    Law(
        "A4",
        "Sparse MLA: softmax over the chosen rows, value the latent part, lse a natural logarithm; a row "
        "without keys gives 0 and lse −inf.",
        SPARSE,
    ),
    Law(
        "A5",
        "Sharded output equals the dense oracle: fp64 within 1e-10 relative, lower precision within a budget "
        "derived from a twin on one rank.",
        FORWARD,
    ),
    Law(
        "A6",
        "Attention in which each rank attends to its own pages only, merged over ranks, equals that over the "
        "full view; an empty shard contributes nothing.",
        SHARDED,
    ),
    Law(
        "A7",
        "Influence: changing one visible token changes exactly the rows that may see it.",
        FORWARD,
    ),
    Law(
        "F1",
        "Packing and unpacking is exact where the format is, and within one rounding of the element type "
        "elsewhere; an all-zero tile gives zeros.",
        FORMATS,
    ),
    Law("F2", "Byte offsets are computed in 64 bits, whatever the type of the slots.", PAGES),
    Law(
        "D1",
        "Embedding only local ids, shifted before the split, equals splitting the full embedding, bit for "
        "bit, on empty ranks too.",
        DRAFT,
    ),
    Law(
        "D2",
        "Without a plan of this batch all ranks embed all ids, with a warning; else a rank embeds "
        "max_rank_rows at most.",
        DRAFT,
    ),
)

LAWS = MappingProxyType({law.id: law for law in _ALL})


def law(law_id: str) -> Law:
    """The law of that number; :class:`InvalidInput` if there is none."""
    if law_id not in LAWS:
        near = get_close_matches(law_id.upper(), LAWS, n=3, cutoff=0.3)
        raise InvalidInput(
            "law",
            expected=f"one of {', '.join(near or LAWS)}",
            received=law_id,
            fix="`cpkv laws` lists them.",
        )
    return LAWS[law_id]
