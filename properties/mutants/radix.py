"""Wrong trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from properties.mutants.mutant import Right, mutant
from refmodel.layout.geometry import num_pages
from refmodel.layout.placement import page_lanes
from refmodel.layout.plan import Plan
from refmodel.serving import radix_victims, request_pages
from refmodel.serving.page_keys import TOKEN_BYTES, PageKey, PageKeys, Tokens
from refmodel.serving.radix import Hit, HitMode, RadixTree
from refmodel.serving.radix_node import Node, Spot
from refmodel.serving.request_pages import ChunkEnd


@mutant(RadixTree._add, "radix-01", "L6", source="reported in sglang#5221")
def split_inside_a_page(
    right: Right,
    self: RadixTree,
    parent: Node,
    keys: tuple[PageKey, ...],
    pages: tuple[int, ...],
    now: int,
) -> Node:
    """Pages that share first tokens are split at the last of them: [a, b, c] becomes [a, b] above [c]."""
    for key, lower in parent.children.items():
        shared = self.keys.common(key, keys[0])
        if 0 < shared < self.keys.length(key):
            cut = shared * TOKEN_BYTES
            upper = Node(self._take_id(), parent, (key[:cut],), lower.pages[:1], lower.access)
            lower.hold((key[cut:], *lower.keys[1:]), lower.pages)
            lower.parent = upper
            del parent.children[key]
            parent.children[upper.keys[0]] = self._nodes[upper.id] = upper
            upper.children[lower.keys[0]] = lower
            return right(self, upper, (keys[0][cut:], *keys[1:]), pages, now)
    return right(self, parent, keys, pages, now)


@mutant(PageKeys.count, "radix-02", "L8", source="reported in sglang#24371")
def as_many_pairs_as_tokens(self: PageKeys, num_tokens: int) -> int:
    """n tokens are taken to give n bigram keys: the key of the last page is read past the tokens."""
    return num_tokens


@mutant(RadixTree._longest_hit, "radix-03", "L4", source="reported in nano-vllm#144, vllm#52617")
def whole_prompt_hit(self: RadixTree, num_tokens: int) -> int:
    """A prompt that is cached to a page edge is hit whole: no row is left to query with."""
    keys = self.keys.count(num_tokens)
    return keys - keys % self.keys.page_size


_SALTS: dict[int, int] = {}


@mutant(radix_victims.age, "radix-04", "L7", source="reported in sglang#20460")
def ties_by_object(right: Right, node: Node) -> tuple[int, int]:
    """Of leaves touched at the same time each rank takes its own: by something like an object's id."""
    access, number = right(node)
    return access, number ^ _SALTS.setdefault(id(node.path()[0]), len(_SALTS))


@mutant(RadixTree.match, "radix-05", "L4", source="reported in LMCache#4614")
def one_token_planned_less_than_loaded(right: Right, self: RadixTree, tokens: Tokens, now: int) -> Hit:
    """A hit of a whole prompt counts a token less but brings the pages of all: planned 894, loaded 895."""
    hit = right(self, [*tokens, 2**64 - 1], now)
    return replace(hit, valid=min(hit.valid, len(tokens) - 1))


@mutant(RadixTree.match, "coverage-taken-for-valid", "L4")
def as_many_tokens_as_slots(right: Right, self: RadixTree, tokens: Tokens, now: int) -> Hit:
    """A hit inside a page counts the whole page: valid tokens and coverage are one number."""
    hit = right(self, tokens, now)
    return replace(hit, valid=hit.coverage)


@mutant(RadixTree._closest, "first-page-that-begins-alike", "L4")
def first_that_shares_a_token(right: Right, self: RadixTree, spot: Spot, key: PageKey) -> tuple[Spot, int]:
    """Of several pages with the same first token the oldest is hit, not the one that agrees longest."""
    for following in spot.following():
        if shared := self.keys.common(following.key, key):
            return following, shared
    return spot, 0


@mutant(PageKeys.cut, "page-key-of-p-tokens", "L8")
def last_pair_compared_by_half(
    right: Right, self: PageKeys, tokens: Tokens
) -> tuple[tuple[PageKey, ...], PageKey]:
    """The key of a bigram page is its P tokens: pages that differ in the end of the last pair agree."""
    whole, short = right(self, tokens)
    half, nobody = self.page_size * TOKEN_BYTES, b"\xff" * TOKEN_BYTES * self.overlap
    return tuple(key[:half] + nobody for key in whole), short


@mutant(PageKeys.cut, "page-key-without-its-last-token", "L4", "L6")
def last_token_ignored(right: Right, self: PageKeys, tokens: Tokens) -> tuple[tuple[PageKey, ...], PageKey]:
    """The last token of a page is not in its key: a prompt that differs there alone hits the whole page."""
    whole, short = right(self, tokens)
    return tuple(key[:-TOKEN_BYTES] + bytes(TOKEN_BYTES) for key in whole), short


@mutant(Node.hold, "digest-of-the-first-page", "L7")
def later_keys_not_seen(right: Right, self: Node, keys: tuple[PageKey, ...], pages: tuple[int, ...]) -> None:
    """The digest of a node is of its first page: ranks that hold other tokens behind it look equal."""
    right(self, keys[:1], pages)
    self.keys = keys


@mutant(radix_victims.age, "newest-leaf-first", "L7")
def last_touched_goes_first(right: Right, node: Node) -> tuple[int, int]:
    """The leaf touched last is evicted first: what was just computed goes, what nobody asks for stays."""
    access, number = right(node)
    return -access, number


@mutant(RadixTree.__init__, "draft-rows-keyed-by-tokens", "L8")
def keyed_by_tokens(
    right: Right, self: RadixTree, page_size: int, mode: HitMode, *, bigram: bool = False
) -> None:
    """The tree of a server with a draft model keys by tokens: the last row hit has another next one."""
    right(self, page_size, mode)


@mutant(radix_victims.evictable, "locked-evicted", "L6")
def locks_do_not_count(node: Node) -> bool:
    """Eviction does not look at locks: pages of running requests go."""
    return True


@mutant(RadixTree._split, "split-drops-locks", "L6")
def locks_lost_in_a_split(right: Right, self: RadixTree, spot: Spot) -> Node:
    """Both parts of a split start without locks: the request that locked the node is forgotten."""
    upper = right(self, spot)
    spot.node.locks = 0
    return upper


@mutant(RadixTree._split, "split-renames-the-end", "L6")
def lower_part_is_the_new_node(right: Right, self: RadixTree, spot: Spot) -> Node:
    """The upper part of a split keeps number and locks of the node: a lock on its end is on its beginning."""
    lower, upper = spot.node, right(self, spot)
    upper.id, lower.id = lower.id, upper.id
    upper.locks, lower.locks = lower.locks, 0
    self._nodes[upper.id], self._nodes[lower.id] = upper, lower
    return upper


@mutant(RadixTree.match, "hits-do-not-touch", "L7")
def access_time_of_inserts_only(right: Right, self: RadixTree, tokens: Tokens, now: int) -> Hit:
    """A hit does not count as an access: what is in constant use is evicted first."""
    times = {node: node.access for node in self._root.below()}
    hit = right(self, tokens, now)
    for node, access in times.items():
        node.access = access
    return hit


@mutant(radix_victims.victim, "leaves-of-the-lane-only", "L3", "L6")
def inner_nodes_do_not_count(
    right: Right, nodes: Iterable[Node], root: Node, lane: int, world_size: int
) -> Node | None:
    """A lane whose pages all have pages behind them is given up, though those could go first."""
    found = right(nodes, root, lane, world_size)
    return found if found and found.owns(lane, world_size) else None


@mutant(request_pages.end_of_chunk, "own-pages-kept", "L6")
def not_rebound(right: Right, tree: RadixTree, tokens: Tokens, pages: Sequence[int], now: int) -> ChunkEnd:
    """The request keeps its own pages at the end of a chunk, though the duplicates among them are freed."""
    return replace(right(tree, tokens, pages, now), pages=tuple(pages))


@mutant(request_pages.end_of_chunk, "duplicates-freed-twice", "L6")
def freed_by_insert_and_by_rebind(
    right: Right, tree: RadixTree, tokens: Tokens, pages: Sequence[int], now: int
) -> ChunkEnd:
    """Duplicates are freed at the insert, and again when the request is rebound."""
    end = right(tree, tokens, pages, now)
    return replace(end, duplicates=end.duplicates * 2)


@mutant(request_pages.end_of_chunk, "duplicates-leak", "L6")
def never_freed(right: Right, tree: RadixTree, tokens: Tokens, pages: Sequence[int], now: int) -> ChunkEnd:
    """Nobody frees the duplicates: their pages are lost."""
    return replace(right(tree, tokens, pages, now), duplicates=())


@mutant(request_pages.end_of_chunk, "open-tail-inserted", "L6")
def tail_goes_to_the_tree(tree: RadixTree, tokens: Tokens, pages: Sequence[int], now: int) -> ChunkEnd:
    """The open tail, too, goes to the tree at the end of a chunk: the next chunk must copy it to go on."""
    inserted = tree.insert(tokens, pages, now, finished=True)
    own = tuple(pages[: num_pages(len(tokens), tree.keys.page_size)])
    return ChunkEnd(
        (inserted.pages + inserted.rest)[: len(own)], inserted.duplicates, inserted.adopted, inserted.node
    )


@mutant(request_pages.copy_on_write, "shared-tail-written", "L5")
def never_copied(pages: Sequence[int], valid: int, is_held: Callable[[int], bool], page_size: int) -> None:
    """A shared tail is extended in place: the tree's slots past its valid length get one request's rows."""


@mutant(request_pages.copy_on_write, "last-page-copied", "L5")
def last_page_not_tail(
    right: Right, pages: Sequence[int], valid: int, is_held: Callable[[int], bool], page_size: int
) -> int | None:
    """The last page is looked at, though pages for the tokens to come lie behind the tail already."""
    return len(pages) - 1 if valid % page_size and is_held(pages[-1]) else None


@mutant(request_pages.copy_lane, "copy-in-the-last-lane", "L5")
def lane_of_the_last_page(plan: Plan, request: int) -> int:
    """The copy goes to the lane of the extent's last page: its rows are computed by another rank."""
    return int(page_lanes(plan, request)[-1])
