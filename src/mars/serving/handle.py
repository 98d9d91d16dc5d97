"""What a caller holds of a submitted request: a stream of events that ends with the result."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from mars.decoding.request import Request, Result
from mars.decoding.row import Event


class RequestHandle:
    """A submitted request, from `Engine.submit`. Any number of threads and tasks may use it.

        for event in handle: ...            the events, from the first on, as they come
        async for event in handle: ...      the same in asyncio
        result = handle.result(timeout=10)  wait for the result
        result = await handle               the same in asyncio

    The texts of the events join to the text of the result, their tokens to its tokens. All four
    raise the request's error if it fails: what its own hook has raised, or `ForwardError`.

    Attributes:
        index: the request's number in its engine, which its events carry.
        request: the prompt's tokens and the options.
        deadline: when it times out, as a time of `time.monotonic`; None: never.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        deadline: float | None,
        cancel: Callable[["RequestHandle"], None],
    ) -> None:
        """Make one for a request; `Engine.submit` does."""
        self.index = index
        self.request = request
        self.deadline = deadline
        self._cancel = cancel
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._is_done = False
        self._sleepers: set[asyncio.Future[None]] = set()

    def done(self) -> bool:
        """Whether the request has ended, one way or another."""
        return self._is_done

    def cancel(self) -> None:
        """End the request after the forward that runs now, if it has not ended by then.

        Its result then has the finish reason `cancelled` and what was said so far. Returns at once;
        may be called at any time, and again.
        """
        self._cancel(self)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result.

        Args:
            timeout: seconds to wait at most. The request goes on if they are over.

        Raises:
            TimeoutError: the request has not ended by then.
        """
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError(f"request {self.index} has not ended after {timeout} s of wait")
        return self._outcome()

    def __iter__(self) -> Iterator[Event]:
        for place in count():
            with self._changed:
                self._changed.wait_for(partial(self._is_known, place))
            if place == len(self._events):
                break
            yield self._events[place]
        self._outcome()

    async def __aiter__(self) -> AsyncIterator[Event]:
        for place in count():
            await self._known(place)
            if place == len(self._events):
                break
            yield self._events[place]
        self._outcome()

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    def put(self, event: Event) -> None:
        """Tell the news; for the engine only. A result or an error is the last."""
        with self._changed:
            if event.error is None:
                self._events.append(event)
            self._error = event.error
            self._is_done = event.error is not None or event.result is not None
            self._changed.notify_all()
            sleepers, self._sleepers = self._sleepers, set()
        for sleeper in sleepers:
            with suppress(RuntimeError):  # its loop has been closed
                sleeper.get_loop().call_soon_threadsafe(_wake, sleeper)

    def _is_known(self, place: int) -> bool:
        """Whether there is an event at this place, or is none and will be none."""
        return self._is_done or len(self._events) > place

    async def _known(self, place: int) -> None:
        with self._changed:  # nobody holds it for long: the loop does not really block
            if self._is_known(place):
                return
            sleeper = asyncio.get_running_loop().create_future()
            self._sleepers.add(sleeper)
        try:
            await sleeper
        finally:
            with self._changed:
                self._sleepers.discard(sleeper)

    async def _wait(self) -> Result:
        async for _ in self:
            pass
        return self._outcome()

    def _outcome(self) -> Result:
        if self._error is not None:
            raise self._error.with_traceback(None)  # that of an earlier call
        result = self._events[-1].result
        assert result is not None, "has not ended"
        return result


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
