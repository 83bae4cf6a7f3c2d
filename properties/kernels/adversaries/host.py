"""Wrong kernels of the operations in :mod:`refmodel.ops.host`."""

from __future__ import annotations

import torch

from properties.kernels.adversaries.adversary import adversary
from refmodel.ops.host import PAGE_COPY
from refmodel.ops.op import Results

Tensor = torch.Tensor


def _pages(side: Tensor, page_size: int, layout: str) -> Tensor:
    """[layers, pages, P, bytes a token] of shards, or of a pool by its layout: a view."""
    if layout == "page_first_direct":
        return side.movedim(1, 0)
    if not layout:
        return side.view(*side.shape[:2], page_size, -1)
    slots = side.movedim(1, 0) if layout == "page_first" else side
    pages: Tensor = slots.unflatten(1, (-1, page_size))
    return pages


@adversary("page_copy", law="H1")
def first_layer_only(
    device: Tensor,
    host: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    """Pages of layer 0 move, those of the others do not."""
    layer = host.narrow(0 if layout == "layer_first" else 1, 0, 1)
    return PAGE_COPY.reference(device[:1], layer, device_pages, host_pages, page_size, layout, to_host)


@adversary("page_copy", law="H1")
def layer_first_always(
    device: Tensor,
    host: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    """Strides of layer_first, whatever the layout."""
    layers, _, page_bytes = device.shape
    as_layers = host.reshape(layers, -1, page_bytes // page_size)
    PAGE_COPY.reference(device, as_layers, device_pages, host_pages, page_size, "layer_first", to_host)
    host.copy_(as_layers.view(host.shape))
    return ()


@adversary("page_copy", law="H1")
def pages_one_after_the_other(
    device: Tensor,
    host: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    """Host pages are taken from the first one on: right where they follow each other."""
    run = (host_pages.min() if len(host_pages) else 0) + torch.arange(len(host_pages))
    return PAGE_COPY.reference(device, host, device_pages, run, page_size, layout, to_host)


@adversary("page_copy", law="H1")
def sorted_on_one_side(
    device: Tensor,
    host: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    """Local pages are sorted to coalesce them, and their host pages are not."""
    ordered = device_pages.sort().values
    return PAGE_COPY.reference(device, host, ordered, host_pages, page_size, layout, to_host)


@adversary("page_copy", law="H1")
def last_page_left_out(
    device: Tensor,
    host: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    """The grid of the launch is rounded down."""
    return PAGE_COPY.reference(device, host, device_pages[:-1], host_pages[:-1], page_size, layout, to_host)


@adversary("page_copy", law="H1")
def last_token_left_out(
    device: Tensor,
    host: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    """Of each page one token fewer moves."""
    target, pages = (host, host_pages) if to_host else (device, device_pages)
    before = target.clone()
    PAGE_COPY.reference(device, host, device_pages, host_pages, page_size, layout, to_host)
    written, was = (_pages(side, page_size, layout if to_host else "") for side in (target, before))
    written[:, pages, -1] = was[:, pages, -1]
    return ()


@adversary("page_copy", law="H5")
def neighbour_overwritten(
    device: Tensor,
    host: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    """A page more than was named is written, beside the last one."""
    target, pages = (host, host_pages) if to_host else (device, device_pages)
    before = target.clone()
    PAGE_COPY.reference(device, host, device_pages, host_pages, page_size, layout, to_host)
    if len(pages):
        written, was = (_pages(side, page_size, layout if to_host else "") for side in (target, before))
        beside = (int(pages[-1]) + 1) % written.shape[1]
        if beside not in pages.tolist():
            written[:, beside] = 255 - was[:, beside]
    return ()


@adversary("page_copy", law="H1")
def both_ways(
    device: Tensor,
    host: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    page_size: int,
    layout: str,
    to_host: int,
) -> Results:
    """The direction is not looked at: pages always move to the device."""
    return PAGE_COPY.reference(device, host, device_pages, host_pages, page_size, layout, 0)
