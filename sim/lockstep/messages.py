"""Messages from rank to rank: a send and a receive meet, and neither is over before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refmodel.collectives import Call
from refmodel.errors import Where
from sim.failures import Diverged
from sim.lockstep.floor import Floor
from sim.lockstep.meeting import deliver
from sim.surface.operations import Operation


class Messages:
    """Sends and receives of one group that wait for their counterparts, in the order of their issue.

    As in MPI: messages of one rank to another under one tag are received in the order sent, and a receive
    from any rank takes one of the messages that are there, which one is drawn; the next, if there is none.
    """

    def __init__(self, world: str, members: Sequence[int], floor: Floor) -> None:
        self._world = world
        self._members = members
        self._floor = floor
        self._sends: list[Message] = []
        self._receives: list[Message] = []

    def post(self, rank: int, operation: Operation, call: Call) -> Message:
        """Send or receive; not waited for."""
        message = Message(self._floor, rank, self._members[rank], operation, call)
        if operation.kind == "send":
            self._match_first(message, self._sends, self._receives)
        else:
            self._match_first(message, self._receives, self._sends)
        self._floor.go_on(message.member)
        return message

    def _match_first(self, message: Message, own: list[Message], others: list[Message]) -> None:
        candidates: dict[int, Message] = {}
        for other in others:
            send, receive = (message, other) if own is self._sends else (other, message)
            if _match(send, receive):
                candidates.setdefault(other.rank, other)
        if not candidates:
            own.append(message)
            return
        other = candidates[self._floor.choose(sorted(candidates))]
        others.remove(other)
        send, receive = (message, other) if own is self._sends else (other, message)
        self._pass(send, receive)

    def _pass(self, send: Message, receive: Message) -> None:
        (sent,), (received,) = send.operation.sent, receive.operation.received
        if sent.numel() != received.numel() or sent.dtype != received.dtype:
            raise self._floor.fail(self._misfit(send, receive))
        receive.value = sent.detach().clone()
        receive.source = send.rank
        for message in (send, receive):
            message.is_over = True
            message.wake()

    def _misfit(self, send: Message, receive: Message) -> Diverged:
        return Diverged(
            f"the ranks of {self._world} diverge",
            expected=f"rank {send.member} to send what rank {receive.member} expects",
            received=f"{send.call} for {receive.call}",
            where=Where(site=send.call.site),
            positions=self._floor.positions(),
        )


def _match(send: Message, receive: Message) -> bool:
    return (
        send.operation.peer == receive.rank
        and receive.operation.peer in (send.rank, -1)
        and send.operation.tag == receive.operation.tag
    )


class Message:
    """A send or a receive under way. What is received is written when it is waited for."""

    def __init__(self, floor: Floor, rank: int, member: int, operation: Operation, call: Call) -> None:
        self.rank = rank
        self.member = member
        self.operation = operation
        self.call = call
        self.is_over = False
        self.source = operation.peer
        self.value: torch.Tensor | None = None  # what has come and is not written
        self._floor = floor
        self._is_waited_for = False

    def wake(self) -> None:
        """Its rank can go on, if it waits for this."""
        if self._is_waited_for:
            self._floor.wake(self.member)

    def wait(self) -> None:
        if not self.is_over:
            self._is_waited_for = True
            self._floor.wait(self.member, self.call)
        self._write()

    def is_completed(self) -> bool:
        if not self.is_over:
            self._floor.poll(self.member)
        if self.is_over:
            self._write()
        return self.is_over

    def _source_rank(self) -> int:
        return self.source

    def _write(self) -> None:
        if self.value is not None:
            with torch.inference_mode():
                deliver([(self.value,)], [self.operation])
            self.value = None
