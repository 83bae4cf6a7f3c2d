"""What a history file may say: a pool of pages, and operations on it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from refmodel.config import Backend
from refmodel.layout.split import Split
from refmodel.serving.host_layouts import CopyEngine, HostLayout
from refmodel.serving.radix import HitMode
from refmodel.serving.write_policy import WritePolicy
from refmodel.storage.reuse import ViewPath
from sim.cases.scenario import AtLeast0, AtLeast1, Kind, Text, Tokens

Setting = Literal["split", "chunk", "host_layout", "decode_page_size", "backend"]
HostCacheName = Literal["kv", "index", "draft_kv", "draft_index"]


BLOCK_TOKENS = 512  # of a block, as in Mooncake's traces
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A new request: it is matched against the tree, and waits for its first chunk.

    Its prompt is new, or begins as that of another request, or is made of blocks: equal blocks have equal
    tokens, whoever names them.
    """

    request: Text
    tokens: Tokens  # of its prompt
    like: Text | None = None  # a request whose first tokens it shares
    shared: AtLeast0 = 0  # so many
    blocks: list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]] | None = (
        None  # the last may be cut by ``tokens``
    )
    block_tokens: AtLeast1 | None = None  # tokens of a block; 512 if not said
    prefetch: bool = False  # what storage has of it comes to the host first; with storage only

    @property
    def tokens_a_block(self) -> int:
        return self.block_tokens or BLOCK_TOKENS


class Evict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pressure from outside: leaves are evicted until a lane has so many free pages, or none can be."""

    lane: AtLeast0
    free: AtLeast1


class Backup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of a request to the host cache, by their slots: whole pages, or none (H2)."""

    request: Text
    first: AtLeast0  # token
    stop: AtLeast1


class DropHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pressure on the host cache: so many host pages of a lane are evicted, as far as none uses them (H4)."""

    lane: AtLeast0
    count: AtLeast1


class Prefetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first whole pages of a prompt, from storage into the host cache."""

    request: Text  # whose tokens these are; it may have left
    pages: AtLeast1
    arrived: dict[HostCacheName, AtLeast0] = {}  # of what is brought, pages of a cache; default: all (H3)


class Spoil(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of one page and cache in storage goes bad."""

    request: Text  # whose page it is; it may have left
    page: AtLeast0  # position
    cache: HostCacheName
    how: Literal["lose", "truncate", "corrupt"]


class After(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Worked numbers after a step; what is left out is not compared."""

    valid: dict[Text, AtLeast0] = {}  # of each request named: tokens in cache; after a submit, its hit
    free: list[AtLeast0] | None = None  # [W] free pages of each lane


class Gap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that decode must be waiting for, worked out by hand."""

    rank: AtLeast0
    chunk: AtLeast0
    positions: list[AtLeast0]  # page positions of the chunk that no rank has brought

    def __str__(self) -> str:
        return f"rank {self.rank} chunk {self.chunk} positions {self.positions}"


class Send(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A chunk of a request goes to decode: one message of each rank, with the pages that the rank owns."""

    request: Text
    tokens: AtLeast1 | None = None  # where the chunk ends; all that is in cache if not said
    lose: tuple[AtLeast0, ...] = ()  # ranks whose message is lost
    repeat: tuple[AtLeast0, ...] = ()  # ranks whose message comes twice
    late: tuple[AtLeast0, ...] = ()  # ranks whose message comes behind those of the next chunk
    missing: list[Gap] | None = None  # all that decode must be waiting for then


class Resend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was lost of these ranks is sent again, and arrives."""

    request: Text
    ranks: Annotated[list[AtLeast0], msgspec.Meta(min_length=1)]
    missing: list[Gap] | None = None  # all that decode must be waiting for then


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One operation; exactly one of the first keys."""

    submit: Submit | None = None
    forward: list[Text] | None = None  # the next chunk of each of these requests, as far as caps admit them
    decode: list[Text] | None = None  # one sampled token more for each
    finish: Text | None = None  # the request leaves; what it computed stays in the tree
    abort: Text | None = None  # the request leaves; what is its own is freed
    evict: Evict | None = None
    send: Send | None = None
    resend: Resend | None = None
    cancel: Text | None = None  # the transfer of the request ends on both sides, without success
    backup: Backup | None = None  # with a host cache; so are the next three
    drop_host: DropHost | None = None
    prefetch: Prefetch | None = None  # with storage; so is the next
    spoil: Spoil | None = None
    refused: bool = False  # the operation must be refused, and change nothing
    expect: After = After()

    @property
    def name(self) -> str:
        """Which operation it is."""
        return next(name for name in OPERATIONS if getattr(self, name) is not None)


OPERATIONS = (
    "submit",
    "forward",
    "decode",
    "finish",
    "abort",
    "evict",
    "send",
    "resend",
    "cancel",
    "backup",
    "drop_host",
    "prefetch",
    "spoil",
)


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A serving history on W ranks, and what must hold after every step of it."""

    title: Text
    why: Text
    laws: Annotated[list[str], msgspec.Meta(min_length=1)]
    world_size: AtLeast1
    page_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    pages_per_lane: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    history: Annotated[list[Step], msgspec.Meta(min_length=1)]
    hit: Literal["token", "page"] = "token"
    split: Split = Split.PAGE_ALIGNED
    view: ViewPath = ViewPath.FULL
    prefetch: bool = False
    layers: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    model: bool = False  # rows of a tiny model in fp64 instead of identities; outputs against the oracle
    chunk: AtLeast1 | None = None  # most new tokens of a request in a forward
    batch: bool = True  # a forward may take more than one request (G1)
    max_requests: AtLeast1 | None = None
    max_tokens: AtLeast1 | None = None  # sum of page-aligned extends of a forward
    host_pages_per_lane: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0  # 0: there is no host cache
    host_layout: HostLayout = HostLayout.LAYER_FIRST
    copy_engine: CopyEngine = CopyEngine.KERNEL
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    load_anywhere: bool = False  # into other lanes, where that of the host copy has no page left (H4)
    storage: bool = False  # what the host cache gets also goes to files
    draft_layers: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0  # of a draft model, behind those of the model
    bigram: bool = False  # draft rows depend on the next token too, so the tree keys by pairs (L8)
    rotate: bool = False  # requests begin in turn on another rank, so that lanes fill evenly
    decode_page_size: AtLeast1 | None = None  # P of the decode server; that of prefill if not said
    decode_pages: AtLeast1 | None = None  # that the decode server has; as many as all lanes if not said
    backend: Backend = Backend.MOONCAKE  # what carries pages to decode (T6)
    refused_at_start: Setting | None = None  # the setting that the server must refuse: no step is played (X1)
    incident: str | None = None
    source: str | None = None
    worlds: tuple[Kind, ...] = ("lockstep",)
    file: str = msgspec.field(default="", name="<file>")

    @property
    def hit_mode(self) -> HitMode:
        return HitMode(self.hit)
