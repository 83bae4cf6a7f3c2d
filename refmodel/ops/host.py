"""Operations between device and host: pages of a rank's cache, all layers at once (laws H1, H5).

>>> device = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)
>>> host = torch.zeros(4, 2, 2, dtype=torch.uint8)  # page_first: 4 slots, 2 layers, 2 bytes a token
>>> _ = PAGE_COPY.reference(device, host, torch.tensor([2]), torch.tensor([1]), 2, "page_first", 1)
>>> host.tolist()
[[[0, 0], [0, 0]], [[0, 0], [0, 0]], [[8, 9], [20, 21]], [[10, 11], [22, 23]]]
"""

from __future__ import annotations

import torch

from refmodel.errors import Finding, Where
from refmodel.ops.op import Argument, Arguments, Cost, Kind, Op, Results
from refmodel.serving.host_layouts import CopyEngine, HostLayout, HostPool
from refmodel.serving.page_groups import PagePairs
from refmodel.storage.codecs import Plain
from refmodel.storage.formats import Format
from refmodel.storage.identity import Cache

LAYOUTS = tuple(layout.value for layout in HostLayout)
_ENGINES = {
    HostLayout.LAYER_FIRST: CopyEngine.KERNEL,
    HostLayout.PAGE_FIRST: CopyEngine.KERNEL,
    HostLayout.PAGE_FIRST_DIRECT: CopyEngine.DIRECT,
}


def _page_copy(
    device: torch.Tensor,
    host: torch.Tensor,
    device_pages: torch.Tensor,
    host_pages: torch.Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    layers, _, page_bytes = device.shape
    pages_by_layer, pool_bytes = device.contiguous(), host.contiguous()
    pool = HostPool(
        layout=HostLayout(layout),
        engine=_ENGINES[HostLayout(layout)],
        cache=Cache.KV,
        format=Format("bytes", page_bytes // page_size, Plain(torch.uint8, page_bytes // page_size)),
        page_size=page_size,
        layers=layers,
        num_pages=_by_layer(host, layout, page_size).shape[1],
        bytes=pool_bytes,
    )
    pairs = PagePairs(tuple(host_pages.tolist()), tuple(device_pages.tolist()))
    for layer, pages in enumerate(pages_by_layer):
        (pool.store if to_host else pool.load)(pairs, layer, pages)
    for given, changed in ((device, pages_by_layer), (host, pool_bytes)):
        if given.data_ptr() != changed.data_ptr():  # its strides are others
            given.copy_(changed)
    return ()


def _by_layer(host: torch.Tensor, layout: str, page_size: int) -> torch.Tensor:
    """Host bytes of any layout as [layers, pages, page bytes]."""
    if layout == HostLayout.PAGE_FIRST_DIRECT.value:
        return host.movedim(1, 0).flatten(2)
    slots = host.movedim(1, 0) if layout == HostLayout.PAGE_FIRST.value else host
    return slots.reshape(len(slots), slots.shape[1] // page_size, page_size * slots.shape[2])


def _judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
    """Byte for byte: pages that were named are copies (H1), all else is as it was (H5)."""
    layout, page_size = arguments["layout"], arguments["page_size"]
    device = "device", received[0], expected[0]
    host = "host", _by_layer(received[1], layout, page_size), _by_layer(expected[1], layout, page_size)
    (target, written, right), (source, read, as_it_was) = (
        (host, device) if arguments["to_host"] else (device, host)
    )
    wrong = written.ne(right)
    named = torch.zeros(wrong.shape[1], dtype=torch.bool, device=wrong.device)
    named[arguments[f"{target}_pages"]] = True
    return (
        _first("H1", f"{target} pages that are copies", wrong & named[:, None], written, right)
        or _first("H5", f"{target} pages that are not to be written", wrong, written, right)
        or _first("H5", f"{source} pages, which are read", read.ne(as_it_was), read, as_it_was)
    )


def _first(
    law: str, what: str, wrong: torch.Tensor, got: torch.Tensor, right: torch.Tensor
) -> Finding | None:
    """Of bytes [layers, pages, page bytes], those that are wrong."""
    if not bool(wrong.any()):
        return None
    layer, page, byte = place = tuple(wrong.nonzero()[0].tolist())
    count, where = int(wrong.sum()), Where(layer=layer, page=page)
    return Finding(
        law, f"{what}, {count} bytes, first {byte}", str(int(right[place])), str(int(got[place])), where
    )


PAGE_COPY = Op(
    name="page_copy",
    meaning="Pages of all layers between a rank's shards and its host pool; what is not named stays.",
    arguments=(
        Argument(
            "device", Kind.VALUES, "the shards", "[layers, local pages, page bytes]", (torch.uint8,), True
        ),
        Argument(
            "host",
            Kind.VALUES,
            "the pool, D bytes a token",
            "[layers, slots, D], [slots, layers, D] or [pages, layers, P, D]",
            (torch.uint8,),
            True,
        ),
        Argument("device_pages", Kind.INDEX, "local pages, each once", "[n]"),
        Argument("host_pages", Kind.INDEX, "host_pages[i] goes with device_pages[i]; each once", "[n]"),
        Argument("page_size", Kind.INT, "P"),
        Argument("layout", Kind.WORD, f"of the host pool: {', '.join(LAYOUTS)}"),
        Argument("to_host", Kind.INT, "1: device to host, 0: host to device"),
    ),
    results=(),
    reference=_page_copy,
    spaces=lambda device, host, device_pages, host_pages, page_size, layout, to_host: (),
    judge=_judge,
    compared="byte for byte",
    laws=("H1", "H5"),
    cost=lambda device, host, device_pages, host_pages, page_size, layout, to_host: Cost(
        2 * len(device_pages) * device[:, :1].nbytes
    ),
    row_width=lambda device, host, device_pages, host_pages, page_size, layout, to_host: (
        device.shape[-1] // page_size
    ),
)
