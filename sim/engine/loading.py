"""Loads from the host that are under way, and who waits for them (law H4).

A request hits pages on the host when it is submitted. They are brought layer by layer when they are first
read, by whatever reads them: its own forward, another request's, or a transfer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from refmodel.errors import Finding
from refmodel.serving.host_cache import HostCache
from refmodel.serving.host_moves import Landing, Load
from refmodel.serving.layer_gate import NotLoaded
from refmodel.serving.radix import RadixTree
from sim.engine.host_bytes import Bytes, NoBytes
from sim.engine.request import name_number
from sim.histories.history import History


def cache_layers(history: History) -> dict[str, int]:
    """Layers of each cache that a page has; those of the draft model are caches of their own."""
    layers = {"kv": history.layers, "index": history.layers}
    if history.draft_layers:
        layers |= {"draft_kv": history.draft_layers, "draft_index": history.draft_layers}
    return layers


@dataclass(frozen=True, slots=True)
class Loading:
    """Pages that a request hit on the host, on their way. Its lock in the tree keeps them until it leaves."""

    request: str
    landing: Landing


class Loadings:
    """All loads under way, as every rank knows them.

    Each is over at the end of the first forward that reads its pages, when a transfer reads them, or when its
    request leaves; until then its host pages are pinned.
    """

    def __init__(self, history: History, host: HostCache) -> None:
        self.host = host
        self.bytes: Bytes = NoBytes()
        self.under_way: list[Loading] = []
        self._reading: list[Loading] = []  # what the forward under way waits for
        self._model_layers = history.layers

    def begin(self, pages: Iterable[int], copied: Collection[int]) -> None:
        """A forward is about to read pages, and to copy some of them in all layers (H4)."""
        read = {*pages, *copied}
        self._reading = [loading for loading in self.under_way if _overlap(loading, read)]
        for loading in self._reading:
            if _overlap(loading, copied):
                for cache, count in self.host.layers.items():
                    for layer in range(count):
                        self._wait(loading.landing, cache, layer)

    def wait_for_layer(self, layer: int) -> None:
        """The forward is about to read a layer, of the model or behind them of its draft model (H4)."""
        behind = layer - self._model_layers
        for loading in self._reading:
            for cache in ("kv", "index") if behind < 0 else ("draft_kv", "draft_index"):
                self._wait(loading.landing, cache, layer if behind < 0 else behind)

    def _wait(self, landing: Landing, cache: str, layer: int) -> None:
        """Until the layer is there. Layers come in the order in which they are read."""
        for part in self.host.unloaded(landing.load):
            if self._is_loaded(landing.load, cache, layer):
                return
            self._bring(landing, *part)
        self.host.require_layer(landing.load, cache, layer)

    def _is_loaded(self, load: Load, cache: str, layer: int) -> bool:
        try:
            self.host.require_layer(load, cache, layer)
        except NotLoaded:
            return False
        return True

    def _bring(self, landing: Landing, cache: str, layer: int) -> None:
        self.bytes.bring(landing, cache, layer)
        self.host.mark_loaded(landing.load, cache, layer)

    def end(self) -> None:
        """The forward is over, and with it the loads that it waited for."""
        over, self._reading = self._reading, []
        for loading in over:
            self._complete(loading)

    def settle(self, pages: Collection[int]) -> None:
        """Pages are about to be read by another than a forward: what loads into them is waited for."""
        for loading in [each for each in self.under_way if _overlap(each, pages)]:
            self._complete(loading)

    def leave(self, name: str) -> None:
        """A request leaves: what still loads for it is waited for, as others may hit the pages by now."""
        for loading in [each for each in self.under_way if each.request == name]:
            self._complete(loading)

    def _complete(self, loading: Loading) -> None:
        for cache, layer in self.host.unloaded(loading.landing.load):
            self._bring(loading.landing, cache, layer)
        self.host.finish(loading.landing.load)
        self.under_way.remove(loading)

    def fingerprint(self) -> tuple[object, ...]:
        """Requests, numbers and pages of the loads under way, as integers."""
        return tuple(
            (name_number(each.request), each.landing.load.number, each.landing.pages)
            for each in self.under_way
        )

    def check(self, tree: RadixTree) -> list[Finding]:
        """Where a page that is loading is not in the tree, or loads twice (H4). None, unless broken."""
        pages = [page for loading in self.under_way for page in loading.landing.pages]
        astray = sorted(page for page in pages if not tree.holds(page))
        if astray or len(set(pages)) != len(pages):
            return [Finding("H4", "pages that are loading", "pages of the tree, each once", str(pages))]
        return []


def _overlap(loading: Loading, pages: Collection[int]) -> bool:
    return any(page in pages for page in loading.landing.pages)
