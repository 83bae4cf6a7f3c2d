"""Services that histories are drawn for: few small pages, so that lanes run out and tails are everywhere.

Most services have few features: what a service can do costs steps that others need, and time.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from properties.drawing.choices import Choices
from refmodel.config import Backend
from refmodel.layout.split import Split
from refmodel.serving.host_layouts import FITTING, CopyEngine, HostLayout
from refmodel.serving.write_policy import WritePolicy
from refmodel.storage.reuse import ViewPath
from sim.histories.history import History, Setting, Step, Submit

LAWS = (
    *("L1", "L2", "L3", "L4", "L5", "L6", "L7", "G1", "G2", "G4"),
    *("H1", "H2", "H3", "H4", "H5", "T1", "T2", "T3", "T4", "T5", "V1", "V6"),
)

# How often a service has which features; files on disk and a model take their time.
_FEATURES: dict[tuple[str, ...], int] = {
    (): 20,
    ("host",): 16,
    ("transfer",): 20,
    ("host", "transfer"): 2,
    ("host", "storage"): 12,
    ("model",): 1,
    ("host", "model"): 1,
    ("transfer", "model"): 1,
}
_FITTING = [(layout, engine) for engine, layouts in FITTING.items() for layout in layouts]
_VIEWS = (ViewPath.FULL, ViewPath.CURRENT, ViewPath.PARTIAL)


def drawn_service(choices: Choices, ranks: int | None = None) -> tuple[History, tuple[str, ...]]:
    """A history without steps, and the features that the service has; ``ranks``: W, if it is given."""
    features = choices.weighted(_FEATURES)
    W = choices.of([4, 1, 2, 3, 4, 8])
    P = choices.of([4, 1, 2, 3, 4, 5, 16])
    service = History(
        title="Found by a machine",
        why="A law broke in this history.",
        laws=list(LAWS),
        world_size=W,
        page_size=P,
        pages_per_lane=choices.of([4, 6, 8, 3, 5, 2, 1]),
        history=[],
        **_plain_settings(choices, P),
    )
    settings: dict[str, Any] = {}
    if "host" in features:
        settings |= _with_host(choices, "storage" in features)
    if "transfer" in features:
        settings |= _with_decode(choices)
    if "model" in features:
        settings |= {"model": True, "view": choices.of([*_VIEWS, ViewPath.NONE])}
    elif choices.once_in(4 if features else 6):
        settings |= {"draft_layers": choices.between(1, 2), "layers": 1}
        settings |= {"bigram": "host" not in features and bool(choices.below(2))}
    if ranks is not None:
        settings["world_size"] = ranks
    return replace(service, **settings), features


def unfit_services(world_size: int, page_size: int) -> list[History]:
    """Each has one setting with which no server may start, and a step that is never played (X1, H6, T6)."""
    settings: dict[Setting, dict[str, Any]] = {
        "decode_page_size": {"decode_page_size": page_size + 1},
        "backend": {"backend": Backend.NIXL},
        "split": {"split": Split.ROUND_ROBIN},
        "host_layout": {"host_layout": HostLayout.PAGE_FIRST, "copy_engine": CopyEngine.DIRECT},
    }
    plain = History(
        title="Found by a machine",
        why="A server started that must not.",
        laws=["X1"],
        world_size=world_size,
        page_size=page_size,
        pages_per_lane=1,
        history=[Step(submit=Submit("a", 1))],
    )
    return [replace(plain, refused_at_start=key, **unfit) for key, unfit in settings.items()]


def _plain_settings(choices: Choices, page_size: int) -> dict[str, Any]:
    return {
        "hit": choices.of(["token", "token", "token", "page"]),
        "split": choices.of([Split.PAGE_ALIGNED, Split.TOKEN_BALANCED]),
        "view": choices.of(_VIEWS),
        "prefetch": bool(choices.below(2)),
        "layers": choices.between(1, 2),
        "chunk": choices.of([None, choices.between(page_size, 4 * page_size)]),
        "batch": not choices.once_in(10),
        "max_requests": choices.of([None, choices.between(1, 3)]),
        "max_tokens": choices.of([None, page_size * choices.between(1, 6)]),
        "rotate": bool(choices.below(2)),
    }


def _with_host(choices: Choices, storage: bool) -> dict[str, Any]:
    layout, engine = choices.of(_FITTING)
    policies = [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH_SELECTIVE]
    settings = {
        "host_pages_per_lane": choices.of([4, 8, 3, 2, 1]),
        "host_layout": layout,
        "copy_engine": engine,
        "write_policy": choices.of([WritePolicy.WRITE_THROUGH, *policies]),
        "storage": storage,
        "max_tokens": None,
    }
    special = choices.of([{}, _with_other_lanes(choices), _with_one_copy_a_lane(choices)])
    return settings | special


def _with_other_lanes(choices: Choices) -> dict[str, Any]:
    """Loads may land in other lanes: the first must run out, and others must not."""
    return {
        "load_anywhere": True,
        "max_requests": None,
        "batch": True,
        "world_size": choices.of([3, 4, 2]),
        "pages_per_lane": choices.of([1, 2]),
        "rotate": False,
        "chunk": None,
        "write_policy": WritePolicy.WRITE_THROUGH,
    }


def _with_one_copy_a_lane(choices: Choices) -> dict[str, Any]:
    """A prompt of two pages in one lane has no room there, but in others; which lane comes first varies."""
    return {
        "host_pages_per_lane": 1,
        "world_size": choices.of([2, 3]),
        "pages_per_lane": choices.of([6, 4]),
        "rotate": True,
        "chunk": None,
        "write_policy": WritePolicy.WRITE_THROUGH,
    }


def _with_decode(choices: Choices) -> dict[str, Any]:
    """A decode server, now and then too small; prompts of many pages."""
    W, pages = choices.of([2, 3, 4, 1]), choices.of([8, 6, 4])
    few = choices.between(1, W * pages)
    return {
        "world_size": W,
        "pages_per_lane": pages,
        "decode_pages": choices.of([None, None, few]),
    }
