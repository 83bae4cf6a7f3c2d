"""Calls that are not over when they return: asynchronous collectives, and messages from rank to rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sim.world import World


def test_what_is_not_waited_for_is_not_there() -> None:
    def program(group: dist.ProcessGroup) -> list[int]:
        total = torch.tensor([group.rank() + 1])
        work = dist.all_reduce(total, async_op=True)
        dist.barrier()
        seen = [int(total)]  # all have come, and still
        work.wait()
        return [*seen, int(total)]

    for seed in range(5):
        assert World.lockstep(3, seed=seed).run(program) == [[1, 6], [2, 6], [3, 6]]


def test_what_is_sent_is_that_of_the_meeting() -> None:
    """A rank that has waited may reuse its tensor, although others have yet to take what it sent."""

    def program(group: dist.ProcessGroup) -> list[int]:
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        mine = torch.tensor([group.rank()])
        work = dist.all_gather(parts, mine, async_op=True)
        if group.rank() == 1:
            work.wait()
            mine.fill_(99)
        dist.barrier()
        work.wait()
        return [int(part) for part in parts]

    for seed in range(5):
        assert World.lockstep(3, seed=seed).run(program) == [[0, 1, 2]] * 3


def test_a_rank_may_ask_until_it_is_finished() -> None:
    def program(group: dist.ProcessGroup) -> tuple[int, int]:
        own = dist.new_group([1, 2])
        total, asked = torch.tensor([1]), 0
        if group.rank() == 0:
            work = dist.all_reduce(total, async_op=True)
            while not work.is_completed():
                asked += 1
        else:
            for _ in range(3):
                dist.barrier(group=own)
            dist.all_reduce(total)
        return int(total), asked

    for seed in range(3):
        results = World.lockstep(3, seed=seed).run(program)
        assert [total for total, _ in results] == [3, 3, 3]
        assert results[0][1] < 50


def test_futures_are_fulfilled() -> None:
    def program(group: dist.ProcessGroup) -> float:
        work = dist.all_reduce(torch.tensor([1.0]), async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        return float(doubled.wait())

    assert World.lockstep(3).run(program) == [6.0] * 3


# -- messages ----------------------------------------------------------------------------------------------


def test_messages_of_one_rank_arrive_in_order_under_each_tag() -> None:
    def program(group: dist.ProcessGroup) -> list[int]:
        if group.rank() == 0:
            works = [
                dist.isend(torch.tensor([number]), 1, tag=tag)
                for number, tag in [(1, 0), (2, 7), (3, 0), (4, 7)]
            ]
            for work in works:
                assert work is not None
                work.wait()
            return []
        received = torch.zeros(1, dtype=torch.int64)
        numbers = []
        for tag in (7, 0, 0, 7):
            dist.recv(received, 0, tag=tag)
            numbers.append(int(received))
        return numbers

    for seed in range(5):
        assert World.lockstep(2, seed=seed).run(program)[1] == [2, 1, 3, 4]


def test_a_receive_from_any_rank_takes_any_message() -> None:
    def program(group: dist.ProcessGroup) -> tuple[int, ...]:
        if group.rank():
            dist.send(torch.tensor([10 * group.rank()]), 0)
            return ()
        received = torch.zeros(1, dtype=torch.int64)
        senders = []
        for _ in range(group.size() - 1):
            senders.append(dist.recv(received))
            assert received.item() == 10 * senders[-1]
        return tuple(senders)

    orders = {World.lockstep(4, seed=seed).run(program)[0] for seed in range(60)}
    assert orders == {(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)}


def test_batches_of_messages_do_not_block() -> None:
    def program(group: dist.ProcessGroup) -> int:
        rank, size = group.rank(), group.size()
        sent, received = torch.tensor([rank]), torch.zeros(1, dtype=torch.int64)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, (rank + 1) % size),
                dist.P2POp(dist.irecv, received, (rank - 1) % size),
            ]
        )
        assert received.item() == 0
        for work in works:
            work.wait()
        return int(received)

    assert World.lockstep(4).run(program) == [3, 0, 1, 2]
