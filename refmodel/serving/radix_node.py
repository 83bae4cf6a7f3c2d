"""Nodes of the radix tree: a run of pages each, cut only between pages (law L6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from refmodel.layout.ownership import owner
from refmodel.serving.page_keys import PageKey


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages below its parent's. The tree alone changes it.

    The root has no pages; every other node has at least one. A tail, a page that is not full, is a leaf of
    its own. Keys change by :meth:`hold` only, which keeps ``digest`` theirs.
    """

    id: int  # creation number; kept by the lower part of a split, so that a lock stays where it was
    parent: Node | None  # the root has none
    keys: tuple[PageKey, ...]  # one a page
    pages: tuple[int, ...]  # logical pages
    access: int  # logical time of the last match or insert that came here
    locks: int = 0  # taken at this node; it stands above locked children anyway, for only leaves are evicted
    children: dict[PageKey, Node] = field(default_factory=dict)  # by their first page, in order of creation
    _lanes: tuple[int, frozenset[int]] = field(
        init=False, repr=False
    )  # world size, and who owns pages under it
    digest: int = field(init=False)  # of the keys: equal in every process, as Python's hash of bytes is not

    def __post_init__(self) -> None:
        self.hold(self.keys, self.pages)

    def hold(self, keys: tuple[PageKey, ...], pages: tuple[int, ...]) -> None:
        """Have these pages from now on."""
        self.keys, self.pages = keys, pages
        self.digest = int.from_bytes(blake2b(b"".join(keys), digest_size=8).digest(), "little")
        self._lanes = (0, frozenset())

    @property
    def above(self) -> Node:
        """Its parent; above the root is the root itself."""
        return self.parent or self

    def path(self) -> tuple[Node, ...]:
        """From the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return tuple(reversed(nodes))

    def below(self) -> list[Node]:
        """This node and all below it, parents before children, in order of creation."""
        found, stack = [], [self]
        while stack:
            node = stack.pop()
            found.append(node)
            if node.children:
                stack.extend(reversed(node.children.values()))
        return found

    def row(self) -> tuple[int, ...]:
        """This node in numbers: itself, with a digest of its page keys, then its pages."""
        return self.id, self.above.id, self.access, self.locks, self.digest, *self.pages

    def owns(self, lane: int, world_size: int) -> bool:
        """Whether a page of this node is in a lane."""
        if self._lanes[0] != world_size:
            self._lanes = world_size, frozenset(owner(page, world_size) for page in self.pages)
        return lane in self._lanes[1]


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """A place between pages: behind the first ``used`` pages of a node."""

    node: Node
    used: int

    @property
    def pages(self) -> tuple[int, ...]:
        """All pages from the root to here."""
        above = (page for node in self.node.path()[:-1] for page in node.pages)
        return (*above, *self.node.pages[: self.used])

    @property
    def key(self) -> PageKey:
        """Of the page just before this place."""
        return self.node.keys[self.used - 1]

    @property
    def inside(self) -> bool:
        """Whether pages of the node follow."""
        return self.used < len(self.node.pages)

    def following(self) -> list[Spot]:
        """The places one page further on, in order of creation."""
        if self.inside:
            return [Spot(self.node, self.used + 1)]
        return [Spot(child, 1) for child in self.node.children.values()]


def descend(root: Node, whole: Sequence[PageKey]) -> Spot:
    """Behind the last page that equals the page keys given, all of whole pages."""
    node, used = root, 0
    for key in whole:
        if used < len(node.keys):
            if node.keys[used] != key:
                break
            used += 1
        else:
            child = node.children.get(key)
            if child is None:
                break
            node, used = child, 1
    return Spot(node, used)
