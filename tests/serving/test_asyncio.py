"""The engine from asyncio: nothing blocks the loop, and nothing is left behind."""

import asyncio
from collections.abc import Iterator

import pytest

from mars import Engine
from mars.checkpoint import Checkpoint
from mars.decoding.generate import generate
from mars.decoding.row import Event
from mars.serving.errors import EngineClosed, EngineFull
from mars.serving.handle import RequestHandle
from tests.serving.conftest import PATIENCE, Gate
from tests.serving.test_engine import LONG, MIXED, SHORT, broken


@pytest.fixture
def engine(llama: Checkpoint) -> Iterator[Engine]:
    with Engine(llama, max_rows=1, max_waiting=1) as engine:
        yield engine


async def hold(engine: Engine, after: int = 0) -> tuple[Gate, RequestHandle]:
    gate = Gate(2, after)
    handle = await engine.submit_async([9, 8], LONG, logits_hook=gate)
    await asyncio.to_thread(gate.wait)
    return gate, handle


async def events_of(handle: RequestHandle) -> list[Event]:
    return [event async for event in handle]


def test_many_tasks(llama: Checkpoint) -> None:
    cases = [([token, token + 1], options) for token in range(4, 24) for options in MIXED]
    expected = [generate(llama, *case).token_ids for case in cases]

    async def ask(engine: Engine, number: int) -> list[int]:
        handle = await engine.submit_async(*cases[number])
        if number % 2:
            return (await handle).token_ids
        events = await events_of(handle)
        assert events == list(handle)
        return [token for event in events for token in event.token_ids]

    async def main() -> list[list[int]]:
        with Engine(llama, max_rows=4, max_waiting=3) as engine:
            return await asyncio.gather(*(ask(engine, i) for i in range(len(cases))))

    assert asyncio.run(main()) == expected


def test_events_come_while_the_answer_is_written(engine: Engine) -> None:
    async def main() -> None:
        gate, handle = await hold(engine, after=2)
        stream = aiter(handle)
        first = [await anext(stream), await anext(stream)]
        third = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not third.done()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(third), 0.01)
        both = [asyncio.create_task(events_of(handle)) for _ in range(2)]
        await asyncio.sleep(0)
        gate.open()
        rest = [await third, *[event async for event in stream]]
        assert await both[0] == await both[1] == [*first, *rest]
        assert (await handle) is rest[-1].result

    asyncio.run(main())


def test_waiting_for_room_does_not_block_the_loop(engine: Engine, llama: Checkpoint) -> None:
    async def main() -> None:
        gate, first = await hold(engine)
        await engine.submit_async([7], SHORT)
        with pytest.raises(EngineFull):
            await engine.submit_async([6], SHORT, block=False)
        with pytest.raises(EngineFull):
            await engine.submit_async([6], SHORT, timeout=0.01)
        blocked = [asyncio.create_task(engine.submit_async([t], SHORT)) for t in (6, 5, 4)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in blocked)
        blocked[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked[1]
        first.cancel()
        gate.open()
        handles = [await blocked[0], await blocked[2]]
        assert [handle.request.prompt_ids for handle in handles] == [[6], [4]]
        for handle in handles:
            alone = generate(llama, handle.request.prompt_ids, SHORT)
            assert (await handle).token_ids == alone.token_ids

    asyncio.run(main())
    engine.close()
    assert len(engine._queue) == 0


def test_whoever_waits_longest_for_room_comes_first(engine: Engine) -> None:
    ended = []

    async def ask(token: int) -> None:
        await (await engine.submit_async([token], SHORT))
        ended.append(token)

    async def main() -> None:
        gate, first = await hold(engine)
        tasks = []
        for token in range(20, 40):
            tasks.append(asyncio.create_task(ask(token)))
            await asyncio.sleep(0)
        first.cancel()
        gate.open()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert ended == list(range(20, 40))


def test_a_task_cancelled_as_it_is_accepted_leaves_no_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has said yes, but the task has not heard it yet."""
    withdrawn = []
    cancel = engine._queue.cancel

    def spy(handle: RequestHandle) -> None:
        withdrawn.append(handle)
        cancel(handle)

    async def main() -> None:
        gate, first = await hold(engine)
        second = await engine.submit_async([7], SHORT)
        task = asyncio.create_task(engine.submit_async([6], LONG))
        await asyncio.sleep(0)
        first.cancel()
        gate.open()
        second.result(PATIENCE)  # blocks the loop while the task's request is accepted
        monkeypatch.setattr(engine._queue, "cancel", spy)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    (handle,) = withdrawn
    assert handle.request.prompt_ids == [6]
    assert handle.result(PATIENCE).finish_reason == "cancelled"


def test_errors_arrive(engine: Engine) -> None:
    async def main() -> None:
        handle = await engine.submit_async([9, 8], SHORT, logits_hook=broken)
        with pytest.raises(ZeroDivisionError):
            await handle
        with pytest.raises(ZeroDivisionError):
            await events_of(handle)
        gate, first = await hold(engine)
        await engine.submit_async([7], SHORT)
        blocked = asyncio.create_task(engine.submit_async([6], SHORT))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(engine.close, cancel=True))
        with pytest.raises(EngineClosed):
            await blocked
        gate.open()
        await closing
        assert (await first).finish_reason == "cancelled"

    asyncio.run(main())


def test_a_loop_that_ends_first_harms_nobody(engine: Engine) -> None:
    async def main() -> tuple[Gate, RequestHandle]:
        gate, handle = await hold(engine, after=3)
        task = asyncio.create_task(events_of(handle))
        await asyncio.sleep(0)
        assert not task.done()
        return gate, handle  # the loop cancels the task and closes

    gate, handle = asyncio.run(main())
    loop = asyncio.new_event_loop()
    handle._sleepers.add(loop.create_future())  # as of a loop that was closed carelessly
    loop.close()
    gate.open()
    assert len(handle.result(PATIENCE).token_ids) == LONG.max_new_tokens
