"""A history so far, step by step: foreseen, done by an engine without bytes, compared, and learnt from."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from properties.rehearsal.compare import compared
from properties.rehearsal.foresee import foresee
from properties.rehearsal.host_model import Change
from properties.rehearsal.marks import Before, reached
from properties.rehearsal.model import Model
from properties.rehearsal.outlook import Outlook
from refmodel.errors import Finding, InvalidInput
from refmodel.serving.lanes import OutOfPages
from sim.engine.request import Request
from sim.histories.history import After, History, Step


class Rehearsal:
    """The steps so far, an engine that made them, and the model. :meth:`step` changes all three."""

    def __init__(self, history: History) -> None:
        self.setting = history
        self.model = Model(history)
        self.steps: list[Step] = []
        self.findings: list[Finding] = []
        self.marks: set[str] = set()
        self.free: list[tuple[int, ...]] = []  # [steps][W] free pages after each step
        self.extends: list[bool] = []  # [steps] whether prefill computed rows in it
        self.evictions = 0  # pages that left the tree
        self.crowded = False  # the last step found no pages
        self.of_one_age = 0  # most leaves of one access time that an eviction had to choose from
        self.moved = 0  # pages that were loaded into another lane than that of their host copy
        self.out_of_order = 0  # pages of a request that are not in the order of their numbers

    @property
    def history(self) -> History:
        """The history so far, with what the model says of each step."""
        return msgspec.structs.replace(self.setting, history=self.steps)

    # -- a step ------------------------------------------------------------------------------------------

    def step(self, wanted: Step) -> None:
        """Do one operation. What it says of itself is replaced by what the model says."""
        model, outlook = self.model, foresee(self.model, wanted)
        before = Before(model, outlook)
        self.crowded = outlook.out_of_pages
        step = _stated(wanted, outlook)
        self.steps.append(step)
        number = model.tables.now = len(self.steps)
        self.of_one_age = max(self.of_one_age, before.of_one_age)
        leaving = model.running.get(step.finish or step.abort or "")
        reading = [page for part in outlook.parts for page in model.running[part.name].pages]
        model.engine.heard.forget()
        try:
            refusal, found = self._done(step, outlook)
            found += compared(model, step, outlook, refusal)
            if not found:
                found += self._learn(step, outlook, leaving, reading)
            if not found:
                self.marks.update(reached(model, step, outlook, before))
        except Exception as crash:  # a wrong engine may do anything
            found = [Finding("crash", "engine", "a result", repr(crash))]
        self.free.append(model.free_pages())
        self.extends.append(bool(outlook.parts))
        self.findings += [replace(each, where=replace(each.where, step=number)) for each in found]

    def _done(self, step: Step, outlook: Outlook) -> tuple[str | None, list[Finding]]:
        """Why it was refused, or None; what the engine found wrong."""
        engine, tables = self.model.engine, self.model.tables
        before = tables.fingerprint() if outlook.refused else None  # else a refusal is a finding anyway
        refusal: str | None = None
        found = engine.storage.findings
        try:
            getattr(engine, step.name)(getattr(step, step.name))
        except InvalidInput as refused:
            refusal = str(refused)
            if before not in (None, tables.fingerprint()):
                found.append(Finding("L1", f"tables after a refused {step.name}", "as before", "others"))
        except OutOfPages as refused:  # what was evicted before stays so
            refusal = str(refused)
        found, engine.storage.findings = [*found, *tables.check()], []
        return refusal, found

    # -- afterwards ---------------------------------------------------------------------------------------

    def _learn(
        self, step: Step, outlook: Outlook, leaving: Request | None, reading: list[int]
    ) -> list[Finding]:
        """What each page stands for from now on; and whether tree and host cache have what they must have."""
        model, heard = self.model, self.model.engine.heard
        self.evictions += len(heard.evicted)
        model.tree.forget(heard.evicted)
        if not outlook.refused:
            self._learn_pages(step, outlook, leaving)
            self._learn_transfers(step)
        found = []
        if set(model.tree.contents) != set(model.tables.tree.pages()):
            found.append(Finding("L6", "pages of the tree", "those inserted and not evicted", "others"))
        return [*found, *self._learn_host(step, outlook, reading)]

    def _learn_pages(self, step: Step, outlook: Outlook, leaving: Request | None) -> None:
        model = self.model
        if step.submit is not None:  # whole pages may have been loaded, of which the hit counts a token less
            request = model.running[step.submit.request]
            model.tree.learn(request, len(request.ids))
        for part in outlook.parts:
            request = model.running[part.name]
            model.tree.learn(request, request.valid)
            pairs = zip(request.pages, request.pages[1:], strict=False)
            self.out_of_order += sum(one > following for one, following in pairs)
        if step.finish is not None and leaving is not None:
            model.tree.learn(leaving, leaving.valid)

    def _learn_transfers(self, step: Step) -> None:
        transfers = self.model.transfers
        if step.send is not None:
            name, after = step.send.request, transfers.send(step.send, self.model.running[step.send.request])
        elif step.resend is not None:
            name, after = step.resend.request, transfers.resend(step.resend.request, step.resend.ranks)
        else:
            if step.cancel is not None:
                transfers.sent[step.cancel].is_cancelled = True
            for name in filter(transfers.is_there, step.decode or []):
                transfers.sent[name].tokens += 1
            transfers.sent.pop(step.finish or step.abort or "", None)
            return
        if after is not None:
            transfers.sent[name] = after

    def _learn_host(self, step: Step, outlook: Outlook, reading: list[int]) -> list[Finding]:
        model, host = self.model, self.model.host
        if host is None:
            return []
        uses = [(model.running[part.name], part.extent.prefix // model.P) for part in outlook.parts]
        sent = step.send or step.resend
        if outlook.refused:
            change = host.used([], model.engine.heard.evicted)
            return list(host.compare(change, model.engine.heard.filled))
        host.read(model.running[sent.request].pages if sent else reading, step.finish or step.abort)
        if step.submit is not None:
            request = model.running[step.submit.request]
            uses = [(request, 0)]
            if request.valid > outlook.hit:
                host.loaded(step.submit.request, request, outlook.hit)
                _, keys, pages = host.loading[-1]
                self.moved += sum(
                    host.lanes[key] != page % model.W for key, page in zip(keys, pages, strict=True)
                )
        change = self._asked_for(step) or host.used(uses, model.engine.heard.evicted)
        return list(host.compare(change, model.engine.heard.filled))

    def _asked_for(self, step: Step) -> Change | None:
        """What an operation on the host cache itself does to it."""
        model, host = self.model, self.model.host
        assert host is not None
        if step.backup is not None:
            return host.backed_up(model.running[step.backup.request], step.backup.first, step.backup.stop)
        if step.drop_host is not None:
            return host.dropped(step.drop_host)
        if step.prefetch is not None:
            return host.prefetched(step.prefetch, model.seen[step.prefetch.request])
        return None


def _stated(wanted: Step, outlook: Outlook) -> Step:
    """The step with what the model says of it."""
    expect = After(valid=outlook.exact, free=list(outlook.free) if outlook.free else None)
    step = msgspec.structs.replace(wanted, refused=outlook.refused, expect=expect)
    for name in ("send", "resend"):
        operation = getattr(step, name)
        if operation is not None:
            stated = msgspec.structs.replace(operation, missing=outlook.missing)
            step = msgspec.structs.replace(step, **{name: stated})
    return step
