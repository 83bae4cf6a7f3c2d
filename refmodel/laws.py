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
LANES = "refmodel.serving.lanes"
EXTEND = "refmodel.serving.extend"
RADIX = "refmodel.serving.radix"
HOST_LAYOUTS = "refmodel.serving.host_layouts"
PAGE_GROUPS = "refmodel.serving.page_groups"
HOST_CACHE = "refmodel.serving.host_cache"
TRANSFER = "refmodel.serving.transfer"
ADMISSION = "refmodel.serving.admission"
CONFIG = "refmodel.config"


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
    Law(
        "L1",
        "In each lane free, held and cached pages add up to the capacity, after any sequence; a failed "
        "allocation changes nothing.",
        LANES,
    ),
    Law(
        "L2",
        "An extent fills the open tail page first, then takes ceil((prefix+n)/P) − ceil(prefix/P) new pages.",
        EXTEND,
    ),
    Law(
        "L3",
        "Exhaustion is per lane: eviction goes on until the lane asked for has room, or the request is "
        "refused by name.",
        LANES,
    ),
    Law(
        "L4",
        "A radix hit is at most len(input) − 1 tokens; by pages it is floored to a page, by tokens it is "
        "exact, and valid tokens and coverage are two numbers.",
        RADIX,
    ),
    Law(
        "L5",
        "A tail page shared with the tree or another request is read-only: who extends into it copies it "
        "first, into the lane of its compute rank.",
        RADIX,
    ),
    Law(
        "L6",
        "At the end of a chunk the page-aligned part is inserted, duplicates are freed once, the request is "
        "rebound to the tree's pages and keeps its tail; nodes split only between pages, locked ones stay.",
        RADIX,
    ),
    Law("L7", "Victims are equal on every rank: a logical clock and a total order choose them.", RADIX),
    Law("L8", "Bigram keys: n tokens give n − 1 keys; a page of P keys needs P + 1 tokens.", RADIX),
    Law(
        "H1",
        "Device to host to device is the identity for every cache of a page, in every layout and with every "
        "copy engine that goes with it.",
        HOST_LAYOUTS,
    ),
    Law(
        "H2",
        "A group of token indices is accepted only if it is whole pages, in order, on host and device alike; "
        "else it is refused before any byte moves, naming the first bad group.",
        PAGE_GROUPS,
    ),
    Law("H3", "A page is usable only if all its caches are present.", HOST_CACHE),
    Law(
        "H4",
        "A loaded page lands in the lane of its host copy, or every table learns its new owner; no layer is "
        "read before it is loaded, and no host page in use is evicted.",
        HOST_CACHE,
    ),
    Law("H5", "Every rank backs up and loads its own pages: over the ranks each page once.", HOST_CACHE),
    Law(
        "H6",
        "Copy engine and host layout must fit each other: other pairs are refused at start-up, never "
        "rewritten.",
        HOST_LAYOUTS,
    ),
    Law(
        "T1",
        "A chunk that is not the last is sent up to a page; the last sends its tail page as it is.",
        TRANSFER,
    ),
    Law(
        "T2",
        "A rank sends the pages it owns as pairs of local page and page position; the destination is chosen "
        "by position.",
        TRANSFER,
    ),
    Law(
        "T3",
        "Over ranks and chunks every page position arrives exactly once; every rank signals on the last "
        "chunk.",
        TRANSFER,
    ),
    Law(
        "T4",
        "Index pages travel with the same pairs; a count that differs from the receiver's is an error before "
        "any write.",
        TRANSFER,
    ),
    Law("T5", "Decode after transfer equals decode from the replicated cache.", TRANSFER),
    Law("T6", "A backend that can only slice by order is refused with shared KV at start-up.", CONFIG),
    Law("G1", "One request a batch unless the batch flag is on.", ADMISSION),
    Law(
        "G2",
        "Caps on requests and on page-aligned extends are soft for a lone request: it is admitted, however "
        "large.",
        ADMISSION,
    ),
    Law("G3", "The scheduler holds no estimate of bytes: capacity is the allocator's answer.", ADMISSION),
    Law("G4", "Chunks end at page multiples, unless they are the last.", ADMISSION),
    Law(
        "X1",
        "Settings that cannot work together are refused at start-up, naming the setting, its value and what "
        "is allowed.",
        CONFIG,
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
