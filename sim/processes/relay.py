"""torch's own groups beneath ours: every call of a program is recorded, then passed on to gloo or NCCL.

The backends ``cpkv_gloo`` and ``cpkv_nccl`` make torch's group and put a ``Surface`` before it, also for
``new_group`` and device meshes. Collectives run as they would without, the asynchronous ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from refmodel.collectives import Call
from sim.processes.sockets import cut, opened_sockets
from sim.surface.group import Surface
from sim.surface.operations import Operation
from sim.surface.recorder import Recorder
from sim.surface.work import Pending

# The device type that each carries.
DEVICES = {"gloo": "cpu", "nccl": "cuda"}


def backend_name(kind: str) -> str:
    """What to call ``init_process_group`` with: "cpkv_gloo"."""
    return f"cpkv_{kind}"


def register(kind: str, recorder: Recorder, device: torch.device | None = None) -> None:
    """Let this process make groups of ``kind``, "gloo" or "nccl", that write into ``recorder``.

    ``device`` is this rank's GPU. Can be called again: groups made from then on use the new recorder.
    """
    name = backend_name(kind)

    def create(options: Any, _: object) -> dist.ProcessGroup:
        with opened_sockets() as sockets:
            inner = _INNER[kind](options, device)
        inner._set_group_name(options.group_id)
        return _Relay(
            options.group_rank,
            options.group_size,
            inner=inner,
            sockets=sockets,
            recorder=recorder,
            backend=name,
            device=device,
        )

    dist.Backend.register_backend(name, create, extended_api=True, devices=[DEVICES[kind]])


class _Relay(Surface):
    """A surface before a group of torch's own."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        inner: dist.ProcessGroup,
        sockets: Mapping[int, str],
        recorder: Recorder,
        backend: str,
        device: torch.device | None,
    ) -> None:
        def pass_on(operation: Operation, call: Call) -> Pending | None:
            work: Pending | None = getattr(inner, operation.method)(*operation.arguments)
            return work

        super().__init__(rank, size, recorder=recorder, transport=pass_on, backend=backend, device=device)
        self._inner = inner
        self._sockets = sockets

    @property
    def _device_types(self) -> list[torch.device]:
        """For torch, which asks where to put the tensors of an object collective."""
        return self._inner._device_types

    def shutdown(self) -> None:
        self._inner.shutdown()

    def abort(self) -> None:
        """Whoever waits in a call of this group gets an error."""
        self._inner.abort()  # does nothing with gloo
        cut(self._sockets)


def _gloo(options: Any, device: torch.device | None) -> dist.ProcessGroup:
    backend = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    return _group_of(backend, dist.ProcessGroup.BackendType.GLOO, torch.device("cpu"), options)


def _nccl(options: Any, device: torch.device | None) -> dist.ProcessGroup:
    settings: Any = dist.ProcessGroupNCCL.Options()
    settings._timeout = options.timeout
    settings.global_ranks_in_group = options.global_ranks_in_group
    settings.group_name = options.group_id
    backend: Any = dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, settings)
    group = _group_of(backend, dist.ProcessGroup.BackendType.NCCL, torch.device("cuda"), options)
    if device is not None:
        group.bound_device_id = device
        # Connect now: what is wrong with the machine shows before a program runs, and is not its fault.
        backend.eager_connect_single_device(device)
    return group


_INNER: dict[str, Callable[[Any, torch.device | None], dist.ProcessGroup]] = {"gloo": _gloo, "nccl": _nccl}


def _group_of(backend: Any, kind: Any, device: torch.device, options: Any) -> dist.ProcessGroup:
    # As torch itself puts a group together: the methods of a group, not those of its backend, have the
    # names that this version of torch.distributed calls.
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group
