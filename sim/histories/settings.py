"""The settings of a history's server, and which of them it refuses at start-up (laws X1, H6, T6)."""

from __future__ import annotations

from refmodel.config import ServingConfig
from refmodel.errors import InvalidInput
from refmodel.serving.admission import Caps
from sim.histories.history import History

# Of a server's settings, where a file calls them otherwise; the pair of layout and engine has no one name.
_KEYS = {"chunk_size": "chunk", None: "host_layout"}


def server_settings(history: History) -> ServingConfig:
    """What the server is started with. :class:`InvalidInput` if that cannot work."""
    return ServingConfig(
        world_size=history.world_size,
        page_size=history.page_size,
        shared_kv=True,
        split=history.split,
        decode_page_size=history.decode_page_size,
        backend=history.backend,
        batch_flag=history.batch,
        caps=Caps(history.max_requests, history.max_tokens),
        chunk_size=history.chunk,
        host_layout=history.host_layout,
        copy_engine=history.copy_engine,
    )


def key_of(refused: InvalidInput) -> str:
    """The key of a file that has the setting which a server refused."""
    setting = refused.where.path
    return _KEYS.get(setting, setting or "")
