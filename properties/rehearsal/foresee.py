"""What each operation must come to, by counting, from the state before it (laws L1–L6, H2–H4, T1–T5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from properties.rehearsal.host_model import HostModel
from properties.rehearsal.model import Model
from properties.rehearsal.outlook import Outlook
from properties.rehearsal.room import room
from properties.rehearsal.turns import of_decode, of_forward
from refmodel.layout.geometry import num_pages
from refmodel.serving.radix import HitMode
from sim.engine.request import Phase
from sim.histories.history import Backup, DropHost, Evict, Prefetch, Resend, Send, Spoil, Step, Submit


def foresee(model: Model, step: Step) -> Outlook:
    """What a step must come to."""
    outlook = _OPERATIONS[step.name](model, getattr(step, step.name))
    return outlook or Outlook(refused=True, free=model.free_pages())


# -- requests come and go ----------------------------------------------------------------------------------


def _of_submit(model: Model, wanted: Submit) -> Outlook | None:
    if wanted.request in model.seen or (wanted.like is not None and wanted.like not in model.seen):
        return None
    like = model.seen[wanted.like] if wanted.like else None
    most = min(len(like.ids), wanted.tokens) if like else 0
    pages = num_pages(wanted.tokens, model.P)
    if wanted.shared > most or pages > model.W * model.setting.pages_per_lane:
        return None
    hashes: list[int] = like.hashes[: wanted.shared].tolist() if like else []
    hit = model.tree.hit(hashes, wanted.tokens)
    if model.host is not None:
        return _with_load(model, model.host, wanted, hashes, hit)
    return Outlook(valid={wanted.request: (hit,)}, free=model.free_pages(), hit=hit)


def _with_load(model: Model, host: HostModel, wanted: Submit, hashes: Sequence[int], hit: int) -> Outlook:
    """What follows a hit on the host is loaded, if there are pages to load into (H3, H4)."""
    P = model.P
    keys = host.loadable(hashes[P - 1 :: P], hit, wanted.tokens)
    stay = Outlook(valid={wanted.request: (hit,)}, free=model.free_pages(), hit=hit)
    if not keys:
        return stay
    loaded = min((hit // P + len(keys)) * P, wanted.tokens - 1)
    if model.setting.hit_mode is HitMode.PAGE:
        loaded -= loaded % P
    pages = model.tree.pages_with(hashes[hit - 1]) if hit else []
    lanes = Counter(host.lanes[key] for key in keys)
    found = room(model, lanes, taken=True, also_kept=pages[0] if pages else None)
    if found.evicts and len(pages) > 1:  # two tails begin alike: which one is locked is the tree's choice
        return replace(found, refused=False, valid={wanted.request: (hit, loaded)}, free=None, hit=hit)
    if not found.refused:
        return replace(found, valid={wanted.request: (loaded,)}, hit=hit)
    if not model.setting.load_anywhere:
        return replace(found, refused=False, out_of_pages=False, valid=stay.valid, hit=hit)
    if found.evicts:  # what was evicted in vain may have made room in another lane
        return replace(
            found, refused=False, out_of_pages=False, valid={wanted.request: (hit, loaded)}, hit=hit
        )
    if sum(stay.free or ()) < len(keys):
        return stay
    return Outlook(valid={wanted.request: (loaded,)}, hit=hit)  # which lanes help out is left open


def _of_finish(model: Model, name: str) -> Outlook | None:
    request = model.settled(name)
    if request is None or request.phase is not Phase.READY:
        return None
    end, keys = int(request.hashes[request.valid - 1]), request.valid - model.tree.overlap
    stays = keys > 0 and model.setting.hit_mode is HitMode.TOKEN and end not in model.tree.known
    return _freed(model, [] if stays else request.pages[keys // model.P :])


def _of_abort(model: Model, name: str) -> Outlook | None:
    request = model.settled(name)
    return None if request is None else _freed(model, model.own_pages(request))


def _freed(model: Model, pages: Sequence[int]) -> Outlook:
    freed = model.tree.by_lane(pages)
    return Outlook(free=tuple(free + freed[lane] for lane, free in enumerate(model.free_pages())))


def _of_evict(model: Model, wanted: Evict) -> Outlook | None:
    if wanted.lane >= model.W or wanted.free > model.setting.pages_per_lane:
        return None
    return room(model, Counter({wanted.lane: wanted.free}), taken=False)


# -- transfer to decode ------------------------------------------------------------------------------------


def _of_send(model: Model, wanted: Send) -> Outlook | None:
    request = model.running.get(wanted.request)
    sent = None if request is None else model.transfers.send(wanted, request)
    if sent is None:
        return None
    return Outlook(free=model.free_pages(), missing=model.transfers.missing(sent))


def _of_resend(model: Model, wanted: Resend) -> Outlook | None:
    sent = model.transfers.resend(wanted.request, wanted.ranks)
    if sent is None:
        return None
    return Outlook(free=model.free_pages(), missing=model.transfers.missing(sent))


def _of_cancel(model: Model, name: str) -> Outlook | None:
    return Outlook(free=model.free_pages()) if model.transfers.is_under_way(name) else None


# -- host cache --------------------------------------------------------------------------------------------


def _of_backup(model: Model, wanted: Backup) -> Outlook | None:
    request = model.running.get(wanted.request)
    if model.host is None or request is None:
        return None
    change = model.host.backed_up(request, wanted.first, wanted.stop)
    return None if change is None else Outlook(free=model.free_pages())


def _of_drop_host(model: Model, wanted: DropHost) -> Outlook | None:
    if model.host is None or wanted.lane >= model.W:
        return None
    return Outlook(free=model.free_pages())


def _of_prefetch(model: Model, wanted: Prefetch) -> Outlook | None:
    request = model.seen.get(wanted.request)
    if model.host is None or request is None or model.host.prefetched(wanted, request) is None:
        return None
    return Outlook(free=model.free_pages())


def _of_spoil(model: Model, wanted: Spoil) -> Outlook | None:
    request = model.seen.get(wanted.request)
    if model.host is None or request is None or not model.host.may_spoil(wanted, request):
        return None
    return Outlook(free=model.free_pages())


_OPERATIONS: dict[str, Callable[..., Outlook | None]] = {
    "submit": _of_submit,
    "forward": of_forward,
    "decode": of_decode,
    "finish": _of_finish,
    "abort": _of_abort,
    "evict": _of_evict,
    "send": _of_send,
    "resend": _of_resend,
    "cancel": _of_cancel,
    "backup": _of_backup,
    "drop_host": _of_drop_host,
    "prefetch": _of_prefetch,
    "spoil": _of_spoil,
}
