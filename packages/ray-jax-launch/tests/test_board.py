"""The control actor: stop requests on their way to the workers, metrics on their way to the driver."""

import asyncio

from ray_jax_launch._train.control_actor import Board


def test_all_ranks_stop_at_a_step_that_none_has_passed():
    async def agree():
        board = Board()
        waiting = [asyncio.ensure_future(board.wait_for_stop("group", rank)) for rank in range(3)]
        await asyncio.sleep(0)
        assert await board.interrupt()
        assert await asyncio.gather(*waiting) == ["interrupt"] * 3
        return await asyncio.gather(*(board.agree("group", 3, rank, step) for rank, step in enumerate((7, 9, 8))))

    assert asyncio.run(agree()) == [9, 9, 9]


def test_a_group_that_starts_after_an_interrupt_hears_of_it():
    async def start():
        board = Board()
        assert not await board.interrupt()  # nobody listens yet
        return await asyncio.wait_for(board.wait_for_stop("group", 0), 10)

    assert asyncio.run(start()) == "interrupt"


def test_a_preemption_stops_its_own_group_alone():
    async def preempt():
        board = Board()
        first = asyncio.ensure_future(board.wait_for_stop("first", 0))
        await asyncio.sleep(0)
        await board.preempt("first")
        second = asyncio.ensure_future(board.wait_for_stop("second", 0))
        await asyncio.sleep(0)
        return await first, second.cancel()

    assert asyncio.run(preempt()) == ("preemption", True)


def test_no_rank_leaves_while_another_may_still_be_saving():
    async def leave():
        board = Board()
        waiting = asyncio.ensure_future(board.wait_for_stop("group", 0))
        await asyncio.sleep(0)
        await board.preempt("group")
        await waiting
        first = asyncio.ensure_future(board.leave("group", 2, 0))
        await asyncio.sleep(0.05)
        assert not first.done()
        await board.leave("group", 2, 1)
        await asyncio.wait_for(first, 10)

    asyncio.run(leave())


def test_metrics_that_overtake_each_other_come_in_their_order_and_those_of_rank_0_are_the_result():
    async def post():
        board = Board()
        for number in (1, 0, 3, 2):
            await board.post("a worker", number, 0, {"step": number})
        await board.post("another", 0, 1, {"step": 100, "rank": 1})
        return (await board.collect())[0], await board.latest()

    logged, latest = asyncio.run(post())
    assert logged == [*((0, {"step": number}) for number in range(4)), (1, {"step": 100, "rank": 1})]
    assert latest == {"step": 3}
