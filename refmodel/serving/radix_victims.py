"""Which leaf of a radix tree is evicted next, to bring a lane closer to a free page (laws L6, L7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from refmodel.serving.radix_node import Node


def victim(nodes: Iterable[Node], root: Node, lane: int, world_size: int) -> Node | None:
    """The leaf least recently touched that has a page of the lane; else the one below a node that has.

    ``nodes``: all of the tree, in any order. None if locks keep all of the lane, or the tree has none of it.
    Time is linear in nodes; only where no leaf has a page of the lane all pages are looked at.
    """
    leaves = (node for node in nodes if not node.children and node is not root)
    owning = (leaf for leaf in leaves if evictable(leaf) and leaf.owns(lane, world_size))
    below = (node for node in _helpful(root, lane, world_size) if not node.children)
    return min(owning, key=age, default=None) or min(below, key=age, default=None)


def age(node: Node) -> tuple[int, int]:
    """Victims go in this order: equal on every rank, and no two nodes alike (L7)."""
    return node.access, node.id


def evictable(node: Node) -> bool:
    """Whether the node itself may go, once nothing is below it (L6)."""
    return not node.locks


def _helpful(root: Node, lane: int, world_size: int) -> Iterator[Node]:
    """Nodes at or below one that has a page of the lane and that no lock keeps."""
    nodes = root.below()[1:]
    kept = {root.id}
    for node in reversed(nodes):  # children before parents
        if node.id in kept or not evictable(node):
            kept |= {node.id, node.above.id}
    helpful: set[int] = set()
    for node in nodes:  # parents before children
        if node.id not in kept and (node.above.id in helpful or node.owns(lane, world_size)):
            helpful.add(node.id)
            yield node
