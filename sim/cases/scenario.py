"""What a scenario file may say. It names what happens; :mod:`sim.cases.build` works out the rest."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from refmodel.attention.transform import Transform
from refmodel.layout.split import Split
from refmodel.storage.reuse import ViewPath
from refmodel.storage.write import WritePath
from sim.cases.arithmetic import Ids
from sim.cases.case import DraftPlan

AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 23)]  # what fits in an identity
Cached = Annotated[int, msgspec.Meta(ge=0, le=1 << 23)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Check = Literal["identity", "bytes", "isolation", "attention", "draft"]
Placement = Literal["compute_owner", "scrambled"]
Format = Literal["tag", "f64", "f32", "bf16", "fp8"]
Kind = Literal["lockstep", "gloo"]


class Extend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request in a step."""

    request: Text
    tokens: Tokens
    prefix: Cached | None = None  # default: what the request's earlier steps left
    rotation: AtLeast0 = 0


class Expect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worked numbers of a step; what is left out is not compared."""

    segments: list[list[int]] | None = None  # [requests][2W] tokens
    bounds: list[list[int]] | None = None  # [requests][2W + 1] absolute positions
    units: list[list[int]] | None = None  # [requests] [first, stop) page positions
    rows: list[int] | None = None  # [W] local rows of each rank
    max_rank_rows: int | None = None
    prev_rows: list[int] | None = None  # [W] where each rank cuts its rows
    kv_stop: list[list[int]] | None = None  # [W] [prev, next] of the only request
    rank_rows: list[str] | None = None  # [W] e.g. "a[0:2] b[0:1] | a[4:5]"
    new_pages: list[int] | None = None  # [W] pages the step adds to each lane
    write: WritePath | None = None
    view: ViewPath | None = None


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One forward pass: a batch of extents, then padding rows."""

    extend: Annotated[list[Extend], msgspec.Meta(min_length=1)]
    padding: AtLeast0 = 0
    draft: DraftPlan = "current"  # what plan the draft layer is given
    expect: Expect = Expect()


class Remap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worked number of the remap (O2)."""

    slot: int
    owner: int
    local_page: int
    physical: int


class Offsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worked number of the bytes of a cache in production sizes (F2)."""

    cache: Literal["kv", "index"]
    format: Literal["f64", "f32", "bf16", "fp8"]
    slot: AtLeast0
    fields: list[int]  # first byte of each field of the slot


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to the KV of some requests on W ranks, and what must hold."""

    title: Text
    why: Text
    laws: Annotated[list[str], msgspec.Meta(min_length=1)]
    world_size: AtLeast1
    page_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    steps: Annotated[list[Step], msgspec.Meta(min_length=1)]
    split: Split = Split.PAGE_ALIGNED
    incident: str | None = None  # the fault it exposes, e.g. "split-03"
    source: str | None = None  # where that fault was reported
    format: Format = "tag"
    layers: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    placement: Placement = "compute_owner"
    seed: AtLeast0 = 0  # of the scramble of page ids, and of the lanes of pages already in cache
    remap: tuple[Remap, ...] = ()
    offsets: tuple[Offsets, ...] = ()
    view: ViewPath = ViewPath.FULL  # what views are made of
    prefetch: bool = False
    transform: Transform = Transform.PAGED  # how chosen keys are named; like the next two, of the model
    ids: Ids = "random"
    top_k: AtLeast1 | None = None  # keys a row attends to; default: the tiny model's
    checks: tuple[Check, ...] = ("identity", "bytes", "isolation")
    worlds: tuple[Kind, ...] = ("lockstep",)  # where the gate runs it unless told otherwise
    # Where it was read: set by the loader, under a name that no YAML key can have by accident.
    file: str = msgspec.field(default="", name="<file>")
