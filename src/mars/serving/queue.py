"""Between the threads that submit requests and the one that drives the model."""

import asyncio
import threading
from collections import deque
from concurrent.futures import Future

from mars.serving.errors import EngineClosed, EngineFull
from mars.serving.handle import RequestHandle


class RequestQueue:
    """The requests that an engine has accepted, as many as it takes, in the order they came.

    `put`, `put_async`, `cancel` and `close` are for any thread, the rest for the engine's.
    """

    def __init__(self, capacity: int) -> None:
        """Accept requests while fewer than `capacity` of them have not ended."""
        self._capacity = capacity
        self._changed = threading.Condition()  # guards everything below
        self._accepted: dict[int, RequestHandle] = {}  # and not ended
        self._arrived: list[RequestHandle] = []  # accepted, and not taken yet
        self._cancelled: list[int] = []  # and not taken yet
        self._offered: deque[tuple[RequestHandle, Future[None]]] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._accepted)

    def put(self, handle: RequestHandle, *, block: bool, timeout: float | None) -> None:
        """Hand in a request; if `block`, wait for room, but no longer than `timeout` seconds.

        Raises:
            EngineFull: there was no room.
            EngineClosed: `close` has been called.
        """
        accepted = self._offer(handle, block)
        try:
            accepted.result(timeout)
        except TimeoutError:
            self._last_chance(accepted)
        except BaseException:  # an interrupt, or `close`
            self._withdraw(handle, accepted)
            raise

    async def put_async(self, handle: RequestHandle, *, block: bool, timeout: float | None) -> None:
        """Do what `put` does, in asyncio; a task cancelled meanwhile leaves no request behind."""
        accepted = self._offer(handle, block)
        promise = asyncio.wrap_future(accepted)
        try:
            await asyncio.wait([promise], timeout=timeout)
        except asyncio.CancelledError:
            self._withdraw(handle, accepted)
            raise
        if promise.done():
            promise.result()
        else:
            self._last_chance(accepted)

    def cancel(self, handle: RequestHandle) -> None:
        """Ask for the end of a request; nothing happens if it has ended."""
        with self._changed:
            if handle.index in self._accepted:
                self._cancelled.append(handle.index)
                self._changed.notify_all()

    def close(self, *, cancel: bool) -> None:
        """Accept nothing more; if `cancel`, ask for the end of everything accepted."""
        with self._changed:
            self._is_closed = True
            if cancel:
                self._cancelled += self._accepted
            offered, self._offered = self._offered, deque()
            self._changed.notify_all()
        for _, accepted in offered:
            if accepted.set_running_or_notify_cancel():
                accepted.set_exception(_closed())

    def take(self, *, wait: bool) -> tuple[list[RequestHandle], list[int]] | None:
        """Return the requests that came since the last call, and the indices of those to cancel.

        If `wait`, wait until there is one of either, or `close` has been called.

        Returns:
            None once the queue is closed and everything that it accepted has ended.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not wait or self._arrived or self._cancelled or self._is_closed
            )
            if self._is_closed and not self._accepted:
                return None
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        return arrived, cancelled

    def get(self, index: int) -> RequestHandle:
        """Return an accepted request."""
        return self._accepted[index]

    def end(self, index: int) -> None:
        """Forget a request that has ended: there is room for another."""
        with self._changed:
            del self._accepted[index]
            self._accept()

    def indices(self) -> list[int]:
        """Return the requests that have not ended."""
        with self._changed:
            return list(self._accepted)

    def _offer(self, handle: RequestHandle, block: bool) -> Future[None]:
        """Return what is done as soon as the request is accepted, at once if there is room."""
        accepted: Future[None] = Future()
        with self._changed:
            if self._is_closed:
                raise _closed()
            if len(self._accepted) >= self._capacity and not block:
                raise self._full()
            self._offered.append((handle, accepted))
            self._accept()
        return accepted

    def _accept(self) -> None:
        """Accept while there is room: whoever has waited longest comes first."""
        while self._offered and len(self._accepted) < self._capacity:
            handle, accepted = self._offered.popleft()
            if accepted.set_running_or_notify_cancel():  # else its caller has given up
                self._accepted[handle.index] = handle
                self._arrived.append(handle)
                accepted.set_result(None)
                self._changed.notify_all()

    def _last_chance(self, accepted: Future[None]) -> None:
        """Give up a request that is still not accepted; raise why it cannot be."""
        if accepted.cancel():
            raise self._full()
        accepted.result()

    def _withdraw(self, handle: RequestHandle, accepted: Future[None]) -> None:
        if not accepted.cancel():
            self.cancel(handle)

    def _full(self) -> EngineFull:
        return EngineFull(
            f"The engine has {self._capacity} requests, as many as it takes, and there was no room "
            "for another. Try again later, or give the engine a larger max_waiting."
        )


def _closed() -> EngineClosed:
    return EngineClosed("The engine is closed and takes no requests. Make another one.")
