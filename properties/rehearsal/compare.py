"""What a step came to, beside what it must come to (laws L1–L7, G2, G4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from properties.rehearsal.model import Model
from properties.rehearsal.outlook import Outlook
from refmodel.errors import Finding, Where
from refmodel.layout.ownership import owner
from refmodel.serving.radix_node import Node
from sim.histories.history import Step

# What a step that is refused, or not refused, against the model breaks.
_LAW_OF_REFUSAL = {
    "submit": "L4",
    "forward": "L3",
    "decode": "L3",
    "finish": "L6",
    "abort": "L1",
    "evict": "L3",
    "send": "T3",
    "resend": "T3",
    "cancel": "T3",
    "backup": "H2",
    "drop_host": "H4",
    "prefetch": "H3",
    "spoil": "H3",
}


def compared(model: Model, step: Step, outlook: Outlook, refusal: str | None) -> Iterator[Finding]:
    """Where they differ. None, unless something is broken."""
    if (refusal is not None) != outlook.refused:
        expected = "refused" if outlook.refused else "done"
        yield Finding(_LAW_OF_REFUSAL[step.name], step.name, expected, refusal or "done")
        return
    if not outlook.evicts and model.engine.heard.evicted:
        yield Finding("L3", "pages evicted", "none: nothing needs them", "some")
    nodes = {node.id: node for node in model.tree.nodes()}
    yield from _of_locks(model, nodes)
    yield from _of_free_pages(model, outlook)
    if refusal is None:
        yield from _of_valid_tokens(model, outlook)
        yield from _of_parts(model, outlook)
        submitted = [step.submit.request] if step.submit else []
        yield from _of_access(model, nodes, [*submitted, *(part.name for part in outlook.parts)])


def _of_free_pages(model: Model, outlook: Outlook) -> Iterator[Finding]:
    free = model.free_pages()
    if outlook.free not in (None, free):
        yield Finding("L2", "free pages", str(outlook.free), str(free))


def _of_valid_tokens(model: Model, outlook: Outlook) -> Iterator[Finding]:
    for name, values in outlook.valid.items():
        found = model.tables.valid(name)
        if found not in values:
            expected = " or ".join(map(str, values))
            yield Finding("G4" if outlook.parts else "L4", "tokens in cache", expected, str(found))


def _of_access(model: Model, nodes: dict[int, Node], names: Sequence[str]) -> Iterator[Finding]:
    """What a step used is used now: it is evicted last (L7)."""
    now = model.tables.now
    for name in names:
        times = {node.access for node in nodes[model.running[name].node].path() if node.id}
        if times - {now}:
            yield Finding("L7", "access time of what was used", str(now), str(min(times)))


def _of_parts(model: Model, outlook: Outlook) -> Iterator[Finding]:
    """Where pages were taken, what was copied before, and who has the tails afterwards."""
    heard = model.engine.heard
    if len(heard.copies) != outlook.copies:
        yield Finding("L5", "copies of shared tails", str(outlook.copies), str(len(heard.copies)))
    if len(heard.tables) != len(outlook.parts):
        yield Finding("G2", "requests of a batch", str(len(outlook.parts)), str(len(heard.tables)))
        return
    for part, table in zip(outlook.parts, heard.tables, strict=True):
        taken = tuple(owner(page, model.W) for page in table[len(table) - len(part.new_lanes) :])
        if taken != part.new_lanes:
            law = "L5" if taken[1:] == part.new_lanes[1:] else "L3"
            yield Finding(law, "lanes of the pages taken", str(part.new_lanes), str(taken))
        tail = model.running[part.name].pages[part.extent.end // model.P :]
        if any(map(model.tables.tree.holds, tail)):
            yield Finding("L6", "tail after a chunk", "the request's own", "one of the tree")


def _of_locks(model: Model, nodes: dict[int, Node]) -> Iterator[Finding]:
    """Each request locks its node once, and every page of the tree that it uses is on the way there."""
    locks = Counter(request.node for request in model.running.values())
    for number, node in nodes.items():
        if node.locks != locks[number]:
            yield Finding("L6", "locks of a node", str(locks[number]), str(node.locks))
    holds = model.tables.tree.holds
    for name, request in model.running.items():
        safe = {page for node in nodes[request.node].path() for page in node.pages}
        if any(page not in safe and holds(page) for page in request.pages):
            yield Finding("L6", "pages that a request uses", "locked", "not all", Where(request=name))
