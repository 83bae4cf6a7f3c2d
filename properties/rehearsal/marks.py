"""Places that hurt, and whether a step reached them."""

from __future__ import annotations

from collections.abc import Iterator

from properties.rehearsal.model import Model
from properties.rehearsal.outlook import Outlook
from properties.rehearsal.tree_model import leaves_of_one_age
from sim.histories.history import Step

MARKS = (
    "eviction", "out of pages", "refused", "hit", "hit mid-page", "whole prompt cached", "copy on write",
    "decode", "batch", "cut by caps", "chunked", "victims of one age",
    "backed up", "loaded back", "loaded elsewhere", "host eviction", "prefetched", "part arrived",
    "file spoiled",
    "transfer done", "message lost", "message late", "message repeated", "sent again", "cancelled",
    "refused while sending", "draft layers", "hit of pairs", "model",
)  # fmt: skip


def reached(model: Model, step: Step, outlook: Outlook, before: Before) -> Iterator[str]:
    """Marks of a step that is over."""
    yield from _of_the_step(model, step, outlook, before)
    if not outlook.refused:
        yield from _of_the_host(model, step, outlook, before)
        yield from _of_the_transfer(model, step)
    elif step.name in ("finish", "abort", "decode") and before.under_way:
        yield "refused while sending"


class Before:
    """What marks need of the state before a step."""

    def __init__(self, model: Model, outlook: Outlook) -> None:
        # Most leaves of one access time that an eviction has to choose from.
        self.of_one_age = leaves_of_one_age(model.tree.nodes()) if outlook.evicts else 0
        self.copies = set(model.host.lanes) if model.host else set[int]()
        self.under_way = any(map(model.transfers.is_under_way, model.transfers.sent))


def _of_the_step(model: Model, step: Step, outlook: Outlook, before: Before) -> Iterator[str]:
    heard, done = model.engine.heard, not outlook.refused
    hit = outlook.exact.get(step.submit.request, 0) if step.submit and done else 0
    tables = len(heard.tables)
    reached = {
        "eviction": bool(heard.evicted),
        "victims of one age": bool(heard.evicted) and before.of_one_age > 1,
        "out of pages": outlook.out_of_pages,
        "refused": outlook.refused,
        "hit": hit > 0,
        "hit mid-page": hit % model.P > 0,
        "whole prompt cached": step.submit is not None and 0 < hit == step.submit.tokens - 1,
        "copy on write": bool(heard.copies),
        "decode": done and step.decode is not None,
        "batch": tables > 1,
        "cut by caps": 0 < tables < len(step.forward or ()),
        "chunked": any(part.extent.end < len(model.running[part.name].ids) for part in outlook.parts),
        "hit of pairs": hit > 0 and model.setting.bigram,
        "draft layers": tables > 0 and model.setting.draft_layers > 0,
        "model": tables > 0 and model.setting.model,
    }
    yield from (mark for mark, there in reached.items() if there)


def _of_the_host(model: Model, step: Step, outlook: Outlook, before: Before) -> Iterator[str]:
    if model.host is None:
        return
    if model.engine.heard.filled:
        yield "backed up"
    if not before.copies <= set(model.host.lanes):
        yield "host eviction"
    if step.submit is not None and model.running[step.submit.request].valid > outlook.hit:
        yield "loaded back"
        _, keys, pages = model.host.loading[-1]
        if any(model.host.lanes[key] != page % model.W for key, page in zip(keys, pages, strict=True)):
            yield "loaded elsewhere"
    if step.prefetch is not None and set(model.host.lanes) - before.copies:
        yield "part arrived" if step.prefetch.arrived else "prefetched"
    if step.spoil is not None:
        yield "file spoiled"


def _of_the_transfer(model: Model, step: Step) -> Iterator[str]:
    if step.send is not None:
        fates = {"lost": step.send.lose, "late": step.send.late, "repeated": step.send.repeat}
        yield from (f"message {fate}" for fate, ranks in fates.items() if ranks)
    if step.resend is not None:
        yield "sent again"
    if step.cancel is not None:
        yield "cancelled"
    sent = step.send or step.resend
    if sent is not None and model.transfers.sent[sent.request].is_done:
        yield "transfer done"
