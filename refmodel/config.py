"""Settings of a server, refused at start-up where they cannot work together (laws X1, T6).

>>> ServingConfig(world_size=8, shared_kv=True).page_size
64
>>> ServingConfig(world_size=8, shared_kv=True, backend=Backend.NIXL)
Traceback (most recent call last):
...
refmodel.errors.InvalidInput: setting backend with shared_kv on: expected mooncake, got nixl ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Grid
from refmodel.layout.split import Split
from refmodel.serving.admission import Caps
from refmodel.serving.host_layouts import CopyEngine, HostLayout, check_engine


class Role(Enum):
    """What a server does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Backend(Enum):
    """What carries pages from prefill to decode."""

    MOONCAKE = "mooncake"  # any page to any page
    NIXL = "nixl"  # slices, in order


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Settings of one server. :class:`InvalidInput` for what cannot work; nothing is changed to suit."""

    world_size: int = 1  # W, ranks of the CP group
    page_size: int = 64  # P, slots a page
    shared_kv: bool = False  # each page on one rank
    split: Split = Split.PAGE_ALIGNED
    role: Role = Role.PREFILL
    decode_page_size: int | None = None  # P of the decode server; None without one
    backend: Backend = Backend.MOONCAKE
    host_layout: HostLayout = HostLayout.LAYER_FIRST
    copy_engine: CopyEngine = CopyEngine.KERNEL
    batch_flag: bool = False  # more than one request in a shared-KV batch (G1)
    caps: Caps = field(default_factory=Caps)
    chunk_size: int | None = None  # most tokens of a chunk; None: prompts are not cut

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_decode_page_size()
        self._check_shared_kv_is_on()
        self._check_split()
        self._check_role()
        self._check_backend()
        check_engine(self.host_layout, self.copy_engine)

    @property
    def grid(self) -> Grid:
        return Grid(self.world_size, self.page_size)

    def _check_sizes(self) -> None:
        least = {"world_size": 1, "page_size": 1, "decode_page_size": 1, "chunk_size": self.page_size}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum):
                raise _refused(name, expected=f"an integer >= {minimum}", received=value)

    def _check_decode_page_size(self) -> None:
        """Pages are sent whole."""
        if self.decode_page_size not in (None, self.page_size):
            raise _refused(
                "decode_page_size", expected=f"page_size, {self.page_size}", received=self.decode_page_size
            )

    def _check_shared_kv_is_on(self) -> None:
        """Shared KV is off unless it is asked for by name: what needs it does not switch it on."""
        if self.batch_flag and not self.shared_kv:
            raise _refused("batch_flag with shared_kv off", expected="off", received="on")

    def _check_split(self) -> None:
        """Round-robin spreads each page over the ranks, so that no owner computes it."""
        if self.shared_kv and self.split is Split.ROUND_ROBIN:
            allowed = " or ".join(split.value for split in Split if split is not Split.ROUND_ROBIN)
            raise _refused("split with shared_kv on", expected=allowed, received=self.split.value)

    def _check_role(self) -> None:
        """Decode has every page of its requests."""
        if self.shared_kv and self.role is not Role.PREFILL:
            raise _refused("role with shared_kv on", expected=Role.PREFILL.value, received=self.role.value)

    def _check_backend(self) -> None:
        """The pages of one owner are no slice of the request: they need their positions (T6)."""
        if self.shared_kv and self.backend is not Backend.MOONCAKE:
            raise _refused(
                "backend with shared_kv on", expected=Backend.MOONCAKE.value, received=self.backend.value
            )


def _refused(setting: str, *, expected: str, received: object) -> InvalidInput:
    return InvalidInput(
        f"setting {setting}",
        expected=expected,
        received=received,
        where=Where(path=setting.partition(" ")[0]),
        fix="Settings are refused at start-up; none is changed to suit another (X1).",
    )
