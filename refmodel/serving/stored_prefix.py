"""How many leading pages storage (L3) can bring: min over caches and ranks (laws H3, H5).

Every rank keeps in storage the pages it owns, so it can answer for those only. A page that lacks one of its
caches is lacking.

>>> lanes = [0, 1, 0, 1, 0]
>>> own_prefix(lanes, 0, {"kv": [True] * 3, "index": [True, True, False]}, ["kv", "index"])
4
>>> own_prefix(lanes, 1, {"kv": [True, True], "index": [True, True]}, ["kv", "index"])
5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from refmodel.errors import InvalidInput, Where


def own_prefix(
    lanes: Sequence[int], rank: int, present: Mapping[str, Sequence[bool]], caches: Sequence[str]
) -> int:
    """Leading pages of a request up to the first that a rank owns and storage lacks; all if it lacks none.

    ``lanes`` [pages] of the request's pages; ``present`` of each cache: an answer for each page of this rank,
    in order. The least number over all ranks is what a prefetch can bring (H3).
    """
    mine = [position for position, lane in enumerate(lanes) if lane == rank]
    for cache in caches:
        if len(present.get(cache, ())) != len(mine):
            raise InvalidInput(
                "answers of storage",
                expected=f"{len(mine)}, one a page of the rank",
                received=len(present.get(cache, ())),
                where=Where(rank=rank, cache=cache),
            )
    whole = (all(present[cache][i] for cache in caches) for i in range(len(mine)))
    return next((position for position, there in zip(mine, whole, strict=True) if not there), len(lanes))
