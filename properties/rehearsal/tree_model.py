"""The tree as the model knows it: which tokens each of its pages stands for (laws L4, L6).

A prefix is known by its hash, so a page is the hashes of the prefixes that end in it. With pairs as keys (L8)
pair i is known with token i + 1: by the hash of the prefix that ends there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from refmodel.layout.ownership import owner
from refmodel.serving.radix import HitMode, RadixTree
from refmodel.serving.radix_node import Node
from sim.engine.request import Request
from sim.histories.history import History


class TreeModel:
    """Pages of a tree by what they hold. :meth:`forget` and :meth:`learn` change it, after each step."""

    def __init__(self, tree: RadixTree, history: History) -> None:
        self.tree = tree
        # From the history: what the tree makes of its settings is judged.
        self.world_size, self.page_size, self.mode = history.world_size, history.page_size, history.hit_mode
        self.overlap = int(history.bigram)  # tokens that a key has beyond the first of it
        self.contents: dict[int, tuple[int, ...]] = {}  # page → hashes of the prefixes that end in it
        self._known: frozenset[int] | None = frozenset()  # all of them; None if that is out of date

    # -- what it says --------------------------------------------------------------------------------------

    @property
    def known(self) -> frozenset[int]:
        """Hashes of all prefixes in cache."""
        if self._known is None:
            self._known = frozenset().union(*self.contents.values())
        return self._known

    def hit(self, hashes: Sequence[int], tokens: int) -> int:
        """Keys of a prompt in cache; only those of the first ``hashes`` are not new to all (L4)."""
        keys = hashes[self.overlap :]
        hit = min(sum(1 for _ in takewhile(self.known.__contains__, keys)), tokens - 1)
        return hit - hit % self.page_size if self.mode is HitMode.PAGE else hit

    def by_lane(self, pages: Iterable[int]) -> Counter[int]:
        return Counter(owner(page, self.world_size) for page in pages)

    def nodes(self) -> list[Node]:
        """As they are now, parents before children. The one place that looks into the tree."""
        return self.tree._root.below()

    def loose(self, nodes: Sequence[Node], also_kept: int | None = None) -> list[int]:
        """Pages at no locked node and above none (L6); ``also_kept``: a page of a node about to be locked."""
        kept = {
            above.id
            for node in nodes
            if node.locks or (also_kept is not None and also_kept in node.pages)
            for above in node.path()
        }
        return [page for node in nodes if node.id not in kept for page in node.pages]

    def pages_with(self, prefix: int) -> list[int]:
        """Pages in which a prefix ends: of the tree's paths, those that a hit of it could take."""
        return [page for page, content in self.contents.items() if prefix in content]

    # -- what it learns ------------------------------------------------------------------------------------

    def forget(self, evicted: Collection[int]) -> None:
        """Pages left the tree."""
        for page in evicted:
            self.contents.pop(page, None)
        if evicted:
            self._known = None

    def learn(self, request: Request, stop: int) -> None:
        """Pages of a request that are the tree's by now, of its first ``stop`` tokens."""
        P, new = self.page_size, {}
        keys = request.hashes[self.overlap : stop]
        for position, page in enumerate(request.pages):
            if page not in self.contents and self.tree.holds(page):
                new[page] = tuple(keys[position * P : (position + 1) * P].tolist())
        if new:
            self.contents |= new
            self._known = None


def leaves_of_one_age(nodes: Sequence[Node]) -> int:
    """Most leaves without locks that were touched at the same time, as only a batch does."""
    ages = Counter(node.access for node in nodes[1:] if not node.children and not node.locks)
    return max(ages.values(), default=0)
