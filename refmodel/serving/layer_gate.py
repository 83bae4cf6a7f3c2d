"""Which layers of a load have arrived: none is read before (law H4).

A load brings its pages layer by layer, in each of their caches, while layers in front are already computed.

>>> gate = LayerGate({"kv": 2, "index": 2, "draft": 1})
>>> gate.unloaded()
(('kv', 0), ('index', 0), ('draft', 0), ('kv', 1), ('index', 1))
>>> gate.mark_loaded("kv", 0)
>>> gate.require_layer("kv", 0)
>>> gate.require_layer("index", 0)
Traceback (most recent call last):
...
refmodel.serving.layer_gate.NotLoaded: layer of a load: expected loaded before it is read, got not loaded ...
"""

from __future__ import annotations

from collections.abc import Mapping

from refmodel.errors import CpkvError, InvalidInput, Where
from refmodel.layout.geometry import check_in_range


class NotLoaded(CpkvError):
    """A layer was to be read, or a load finished, before its bytes had arrived; nothing was changed."""


class LayerGate:
    """The layers of one load, in each cache. Only :meth:`mark_loaded` changes it, and only forwards."""

    def __init__(self, layers: Mapping[str, int]) -> None:
        self._layers = dict(layers)  # of each cache
        self._loaded: set[tuple[str, int]] = set()

    def unloaded(self) -> tuple[tuple[str, int], ...]:
        """(cache, layer) still to be loaded, in the order in which a forward reads them. All caches count."""
        deepest = max(self._layers.values(), default=0)
        parts = ((cache, i) for i in range(deepest) for cache, layers in self._layers.items() if i < layers)
        return tuple(part for part in parts if part not in self._loaded)

    def mark_loaded(self, cache: str, layer: int) -> None:
        """The bytes of that layer are on the device. :class:`InvalidInput` if they were already."""
        self._check(cache, layer)
        if (cache, layer) in self._loaded:
            raise InvalidInput(
                "layer of a load",
                expected="each layer loaded once",
                received="loaded before",
                where=Where(layer=layer, cache=cache),
            )
        self._loaded.add((cache, layer))

    def require_layer(self, cache: str, layer: int) -> None:
        """:class:`NotLoaded` unless that layer of that cache may be read (H4)."""
        self._check(cache, layer)
        if (cache, layer) not in self._loaded:
            raise NotLoaded(
                "layer of a load",
                expected="loaded before it is read",
                received="not loaded",
                where=Where(layer=layer, cache=cache),
            )

    def _check(self, cache: str, layer: int) -> None:
        if cache not in self._layers:
            raise InvalidInput("cache", expected=f"one of {', '.join(self._layers)}", received=cache)
        check_in_range(layer, self._layers[cache], "layer of a load", Where(layer=layer, cache=cache))

    def fingerprint(self) -> tuple[tuple[int, ...], ...]:
        """The whole state: of each cache, 1 for each layer that is loaded."""
        return tuple(
            tuple(int((cache, i) in self._loaded) for i in range(layers))
            for cache, layers in self._layers.items()
        )
