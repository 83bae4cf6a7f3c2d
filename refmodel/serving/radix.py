"""The radix tree over cached pages: hits, inserts, locks, evictions (laws L4–L8).

Its neighbours: page keys (L8) in :mod:`refmodel.serving.page_keys`, victims (L7) in
:mod:`refmodel.serving.radix_victims`; what a request does with its own list of pages, at the end of a chunk
(L6) and before it writes into a tail (L5), in :mod:`refmodel.serving.request_pages`.

All ranks hold equal trees: a tree knows logical pages, a logical time that the caller passes, and creation
numbers. Pages are the caller's to hand over and get back; the tree neither allocates nor frees.

>>> tree = RadixTree(page_size=4, mode=HitMode.TOKEN)
>>> tree.insert([1, 2, 3, 4, 5, 6], pages=[8, 9], now=1, finished=True).pages
(8, 9)
>>> hit = tree.match([1, 2, 3, 4, 5, 6], now=2)
>>> hit.pages, hit.valid, hit.coverage
((8, 9), 5, 8)
>>> RadixTree(page_size=64, mode=HitMode.PAGE).insert([7] * 128, pages=[8, 9], now=1).pages
(8, 9)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import at_least, check_in_range, num_pages
from refmodel.serving.page_keys import PageKey, PageKeys, Tokens
from refmodel.serving.radix_node import Node, Spot, descend
from refmodel.serving.radix_victims import victim

ROOT = 0


class HitMode(Enum):
    """How exact a hit is (L4)."""

    PAGE = "page"  # whole pages only; the tree holds no tails
    TOKEN = "token"  # valid tokens exact, coverage page-aligned: the contract of shared KV


@dataclass(frozen=True, slots=True)
class Hit:
    """What of a prompt is cached. The pages stay while ``node`` is locked: lock it before any eviction."""

    pages: tuple[int, ...]  # the tree's; the last is read-only for the caller if valid mod P ≠ 0 (L5)
    valid: int  # keys hit: tokens, or pairs of a bigram tree
    node: int  # deepest node touched; 0, the root, if nothing was hit
    page_size: int

    def __post_init__(self) -> None:
        if len(self.pages) != num_pages(self.valid, self.page_size):
            raise InvalidInput(
                "radix hit",
                expected=f"{num_pages(self.valid, self.page_size)} pages for {self.valid} tokens",
                received=f"{len(self.pages)} pages",
            )

    @property
    def coverage(self) -> int:
        """Slots of the pages: not the valid tokens (L4)."""
        return len(self.pages) * self.page_size


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of the caller's pages: each is adopted, a duplicate, the tree's already, or in ``rest``."""

    pages: tuple[int, ...]  # the tree's pages of the tokens inserted: the request's from now on (L6)
    adopted: tuple[int, ...]  # the caller's, now the tree's
    duplicates: tuple[int, ...]  # the caller's that the tree had as others: the caller frees them, once
    rest: tuple[int, ...]  # the caller's behind those inserted: the tail stays with the request
    node: int  # deepest node touched; pages are safe while it is locked


class RadixTree:
    """A prefix tree of cached pages. ``insert`` adds pages, ``evict`` removes them, ``match`` touches them.

    Whatever is refused changes nothing (X3). Two tails, or a tail and a page, may share their first tokens: a
    hit takes the longest match, then the fullest page, so that a tail which a page has overtaken grows old.
    """

    def __init__(self, page_size: int, mode: HitMode, *, bigram: bool = False) -> None:
        self.keys = PageKeys(page_size, bigram)
        self.mode = mode
        self._root = Node(ROOT, None, (), (), access=0)
        self._nodes = {ROOT: self._root}
        self._held: set[int] = set()  # every page of every node, so that `holds` need not search
        self._next_id = ROOT + 1
        self.key_bytes = 0  # of all page keys: 8 a token, a little more for bigrams

    # -- hits --------------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, now: int) -> Hit:
        """The longest cached beginning of a prompt, at most len(tokens) − 1 long (L4)."""
        at_least(0, now, "logical time")
        limit = self._longest_hit(len(tokens))
        whole, short = self.keys.cut(tokens[: limit + self.keys.overlap])
        spot = descend(self._root, whole)
        valid = len(spot.pages) * self.keys.page_size
        if self.mode is HitMode.TOKEN:
            next_key = (*whole, short)[len(spot.pages)]
            closest, shared = self._closest(spot, next_key)
            spot, valid = (closest, valid + shared) if shared else (spot, valid)
        _touch(spot.node, now)
        return Hit(spot.pages, valid, spot.node.id, self.keys.page_size)

    def _longest_hit(self, num_tokens: int) -> int:
        """Keys that a hit may have: one token is left to compute, then the floor of the mode (L4)."""
        keys = min(self.keys.count(num_tokens), max(0, num_tokens - 1))
        return keys if self.mode is HitMode.TOKEN else keys - keys % self.keys.page_size

    def _closest(self, spot: Spot, key: PageKey) -> tuple[Spot, int]:
        """Behind the following page that shares most first keys, and their number; (spot, 0) if none does.

        Of equals the fullest page, then the oldest.
        """
        best, most = spot, (0, 0)
        for following in spot.following():
            shared = (self.keys.common(following.key, key), len(following.key))
            if shared[0] and shared > most:
                best, most = following, shared
        return best, most[0]

    # -- inserts -----------------------------------------------------------------------------------------

    def insert(self, tokens: Tokens, pages: Sequence[int], now: int, *, finished: bool = False) -> Inserted:
        """Hand over a request's pages: the whole ones; of a finished request in mode TOKEN also its tail.

        ``pages``: the request's, by page position. :class:`InvalidInput` if they do not cover its keys, if
        one comes twice, or if one is in the tree in another place: a shared tail that was not copied (L5).
        """
        at_least(0, now, "logical time")
        whole, short = self.keys.cut(tokens)
        tail = (short,) if short and finished and self.mode is HitMode.TOKEN else ()
        keys = (*whole, *tail)
        self._check_table(pages, len(keys))
        spot = self._known(whole, tail)
        known = spot.pages
        mine = tuple(pages[: len(keys)])
        duplicates = tuple(page for page, theirs in zip(mine, known, strict=False) if page != theirs)
        adopted, rest = mine[len(known) :], tuple(pages[len(keys) :])
        self._check_not_held(duplicates + adopted + rest)
        node = self._grow(spot, keys[len(known) :], adopted, now) if adopted else spot.node
        _touch(node, now)
        return Inserted(known + adopted, adopted, duplicates, rest, node.id)

    def _known(self, whole: tuple[PageKey, ...], tail: tuple[PageKey, ...]) -> Spot:
        """Behind the last page whose keys the tree has; a page that begins with a tail has the tail's."""
        spot = descend(self._root, whole)
        if tail and len(spot.pages) == len(whole):
            closest, shared = self._closest(spot, tail[0])
            if shared == self.keys.length(tail[0]):
                return closest
        return spot

    def _grow(self, spot: Spot, keys: tuple[PageKey, ...], pages: tuple[int, ...], now: int) -> Node:
        """New nodes at a spot: one for the whole pages, one below it for the tail. The deepest of them."""
        node = self._split(spot) if spot.inside else spot.node
        num_whole = sum(self.keys.length(key) == self.keys.page_size for key in keys)
        for part in (slice(0, num_whole), slice(num_whole, None)):
            if keys[part]:
                node = self._add(node, keys[part], pages[part], now)
        return node

    def _add(self, parent: Node, keys: tuple[PageKey, ...], pages: tuple[int, ...], now: int) -> Node:
        node = Node(self._take_id(), parent, keys, pages, access=now)
        parent.children[keys[0]] = node
        self._nodes[node.id] = node
        self._held.update(pages)
        self.key_bytes += sum(map(len, keys))
        return node

    def _split(self, spot: Spot) -> Node:
        """Cut a node between pages (L6). The upper part is new: whoever locked the node locked its end."""
        lower, parent = spot.node, spot.node.above
        upper = Node(
            self._take_id(), parent, lower.keys[: spot.used], lower.pages[: spot.used], access=lower.access
        )
        lower.hold(lower.keys[spot.used :], lower.pages[spot.used :])
        lower.parent = upper
        parent.children[upper.keys[0]] = upper  # in the lower part's place: the order stays
        upper.children[lower.keys[0]] = lower
        self._nodes[upper.id] = upper
        return upper

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # -- locks and evictions -----------------------------------------------------------------------------

    def lock(self, node: int) -> None:
        """Keep a node and all above it until as many :meth:`unlock`. The node of a hit or an insert."""
        self._node(node).locks += 1

    def unlock(self, node: int) -> None:
        """Undo one :meth:`lock` of the same node; :class:`InvalidInput` if there is none to undo."""
        found = self._node(node)
        if not found.locks:
            raise InvalidInput("unlock", expected="a locked node", received=f"node {node} with no lock")
        found.locks -= 1

    def evict(self, lane: int, world_size: int) -> tuple[int, ...]:
        """Remove one leaf, to bring a lane closer to a free page; its pages, of any lane, go to the caller.

        Which leaf: :func:`refmodel.serving.radix_victims.victim`. () if locks keep all of the lane, or the
        tree has none of it.
        """
        at_least(1, world_size, "world size W")
        check_in_range(lane, world_size, "lane", Where(rank=lane))
        leaf = victim(self._nodes.values(), self._root, lane, world_size)
        return self._remove(leaf) if leaf else ()

    def _remove(self, leaf: Node) -> tuple[int, ...]:
        del leaf.above.children[leaf.keys[0]]
        del self._nodes[leaf.id]
        self._held.difference_update(leaf.pages)
        self.key_bytes -= sum(map(len, leaf.keys))
        return leaf.pages

    # -- state -------------------------------------------------------------------------------------------

    def holds(self, page: int) -> bool:
        """Whether a page is the tree's, hence read-only (L5)."""
        return page in self._held

    def locks(self) -> int:
        """Locks of all nodes: as many as there are hits and inserts in use."""
        return sum(node.locks for node in self._root.below())

    def pages(self) -> tuple[int, ...]:
        """All pages of the tree, parents before children, in order of creation."""
        return tuple(page for node in self._root.below() for page in node.pages)

    def fingerprint(self) -> tuple[tuple[int, ...], ...]:
        """The whole state: equal on every rank at the same step (L7)."""
        sizes = (self.keys.page_size, list(HitMode).index(self.mode), self.keys.overlap, self._next_id)
        return sizes, *[node.row() for node in self._root.below()]

    def check(self) -> tuple[Finding, ...]:
        """Where L6 does not hold: nodes not of whole pages, a page in two places. None, unless broken."""
        nodes = self._root.below()
        found = [finding for node in nodes for finding in self._check_node(node)]
        pages = [page for node in nodes for page in node.pages]
        if sorted(pages) != sorted(self._held):
            expected = f"{len(self._held)} pages, each once"
            found.append(Finding("L6", "pages of the tree", expected, f"{len(pages)}, or others"))
        return tuple(found)

    def _check_node(self, node: Node) -> Iterator[Finding]:
        sizes = [self.keys.length(key) for key in node.keys]
        P, where = self.keys.page_size, Where(page=node.pages[0] if node.pages else None)
        tail = self.mode is HitMode.TOKEN and len(sizes) == 1 and not node.children
        if not all(size == P or (tail and size > 0) for size in sizes) or len(sizes) != len(node.pages):
            expected = f"whole pages of {P}, or one tail in a leaf"
            yield Finding("L6", f"node {node.id}", expected, f"{len(node.pages)} pages of {sizes}", where)
        for key, child in node.children.items():
            if child.keys[0] != key or child.parent is not node or self._nodes.get(child.id) is not child:
                yield Finding("L6", f"node {child.id}", f"a child of node {node.id}", "another place", where)

    # -- checks ------------------------------------------------------------------------------------------

    def _node(self, node: int) -> Node:
        found = self._nodes.get(node)
        if found is None:
            raise InvalidInput(
                "radix node",
                expected="a node of the tree",
                received=node,
                fix="Lock the node of a hit before anything is evicted.",
            )
        return found

    def _check_table(self, pages: Sequence[int], needed: int) -> None:
        if len(pages) < needed:
            raise InvalidInput("pages of a request", expected=f"at least {needed}", received=len(pages))
        if all(type(page) is int and page >= 0 for page in pages) and len(set(pages)) == len(pages):
            return
        seen: set[int] = set()
        for position, page in enumerate(pages):
            at_least(0, page, f"page at position {position}")
            if page in seen:
                raise InvalidInput(
                    "pages of a request",
                    expected="each page once",
                    received="a page twice",
                    where=Where(page=page),
                )
            seen.add(page)

    def _check_not_held(self, pages: Sequence[int]) -> None:
        for page in pages:
            if self.holds(page):
                raise InvalidInput(
                    "page to insert",
                    expected="a page of the request's own",
                    received="one that the tree holds for other tokens",
                    where=Where(page=page),
                    fix="A shared tail page is copied before a request extends into it (L5).",
                )


def _touch(node: Node, now: int) -> None:
    for touched in node.path():
        touched.access = now
