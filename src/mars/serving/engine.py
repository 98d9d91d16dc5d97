"""Continuous batching: one thread drives a model, requests come and go between its forwards.

    with Engine(load()) as engine:
        for event in engine.submit("Why is the sky blue?", temperature=0.7):
            print(event.text, end="", flush=True)

The decisions are those of `mars.decoding.scheduler`; here are the threads.
"""

import atexit
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from types import TracebackType
from typing import Any, Self

from mars.checkpoint import Checkpoint
from mars.decoding.generate import prepare, with_overrides
from mars.decoding.options import DecodingOptions
from mars.decoding.prompts import as_list
from mars.decoding.request import LogitsHook, Prompt, Request, Result, StopHook
from mars.decoding.row import Event
from mars.decoding.scheduler import Scheduler
from mars.errors import UserError
from mars.serving.errors import ForwardError, without_frames
from mars.serving.handle import RequestHandle
from mars.serving.queue import RequestQueue


class Engine:
    """A model that answers requests as they come, up to `max_rows` of them at a time.

    Every answer is what `mars.generate` would give for that request alone, whatever else runs
    (docs/exactness.md: token for token in float32). All methods may be called from any thread. The
    model must not be changed while the engine is open.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_rows: int = 32,
        max_waiting: int = 256,
        prefill_chunk: int = 512,
        max_positions: int | None = None,
    ) -> None:
        """Start the thread. Call `close` in the end, or use the engine as a context manager.

        Args:
            checkpoint: from `mars.load`.
            max_rows: requests that run together. The KV cache has so many rows, each as long as
                the longest that has run so far.
            max_waiting: requests that may wait for a row; the next one is not accepted until there
                is room (`submit`).
            prefill_chunk: tokens of prompts, padding included, that are read at most between two
                steps of the requests that run already.
            max_positions: tokens that a prompt and its answer may have together; None is the
                model's context.

        Raises:
            UserError: a number is not valid, or does not fit the model.
        """
        for name, value in {
            "max_rows": max_rows,
            "max_waiting": max_waiting,
            "prefill_chunk": prefill_chunk,
        }.items():
            _check_count(name, value)
        self._checkpoint = checkpoint
        self._max_positions = _max_positions(checkpoint, max_positions)
        self._scheduler = Scheduler(
            checkpoint.model,
            max_rows=max_rows,
            max_positions=self._max_positions,
            mask_token_id=None if checkpoint.mars is None else checkpoint.mars.mask_token_id,
            prefill_chunk=prefill_chunk,
            prefill_tokens=prefill_chunk,
            clock=time.monotonic,
        )
        self._queue = RequestQueue(max_rows + max_waiting)
        self._indices = count()
        # A daemon, so that an engine that was forgotten does not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._drive, name="mars-engine", daemon=True)
        atexit.register(self.close, cancel=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(cancel=kind is not None)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Accepted requests that have no row yet."""
        return max(0, len(self._queue) - self.num_running)

    def submit(
        self,
        prompt: Prompt,
        options: DecodingOptions | None = None,
        *,
        raw: bool = False,
        timeout: float | None = None,
        block: bool = True,
        logits_hook: LogitsHook | None = None,
        stop_hook: StopHook | None = None,
        **overrides: Any,
    ) -> RequestHandle:
        """Hand in a request; wait for room in the queue if need be, not for the answer.

        Args:
            prompt: text, chat messages or token ids, as for `mars.generate`; as are `options`,
                `raw` and `overrides`.
            options: how to decode.
            raw: continue text as it stands.
            timeout: seconds from now until the request ends with the finish reason `timeout` and
                what was said by then.
            block: whether to wait for room, up to `timeout`.
            logits_hook: changes the logits of every position. It and `stop_hook` run in the
                engine's thread: all requests wait for them, and they must not wait for the engine.
            stop_hook: asked after every token whether it ends the text.
            **overrides: fields of `options` to change.

        Raises:
            UserError: the prompt or an option is not valid, or does not fit the model.
            EngineFull: there was no room.
            EngineClosed: `close` has been called.
        """
        handle = self._new_handle(prompt, options, raw, timeout, logits_hook, stop_hook, overrides)
        self._queue.put(handle, block=block, timeout=timeout)
        return handle

    async def submit_async(
        self,
        prompt: Prompt,
        options: DecodingOptions | None = None,
        *,
        raw: bool = False,
        timeout: float | None = None,
        block: bool = True,
        logits_hook: LogitsHook | None = None,
        stop_hook: StopHook | None = None,
        **overrides: Any,
    ) -> RequestHandle:
        """Do what `submit` does without blocking the event loop while there is no room.

        Arguments and errors are the same. A task cancelled while it waits here leaves no request
        behind. The prompt is tokenised in the loop's thread.
        """
        handle = self._new_handle(prompt, options, raw, timeout, logits_hook, stop_hook, overrides)
        await self._queue.put_async(handle, block=block, timeout=timeout)
        return handle

    def generate(
        self,
        prompts: Sequence[Prompt],
        options: DecodingOptions | None = None,
        *,
        raw: bool = False,
        **overrides: Any,
    ) -> list[Result]:
        """Answer a list of prompts; return the results in its order.

        The longest prompts go first. So prompts that are read together are of similar length and
        need little padding, the cache has its final size from the start instead of being copied
        while it grows, and what ends last is short. Prompts are tokenised twice, for their lengths
        and when their turn comes: besides the results, memory holds no more requests than the
        engine accepts at a time.

        Args:
            prompts: as for `mars.generate`; so are all other arguments.
            options: how to decode.
            raw: continue text as it stands.
            **overrides: fields of `options` to change.

        Raises:
            UserError: as for `submit`, before anything runs; the message says which prompt.
            Exception: a request has failed. The others are cancelled.
        """
        prompts, is_single = as_list(prompts)
        if is_single:
            raise UserError("Give a list of prompts; for one, use submit(prompt).result().")
        options = with_overrides(options, overrides)
        lengths = []
        for number, prompt in enumerate(prompts, start=1):
            try:
                lengths.append(len(self._prepare(prompt, options, raw).prompt_ids))
            except UserError as error:
                raise UserError(f"prompt {number} of {len(prompts)}: {error}") from error
        results: dict[int, Result] = {}
        pending: dict[int, RequestHandle] = {}
        try:
            for index in sorted(range(len(prompts)), key=lambda index: -lengths[index]):
                pending[index] = self.submit(prompts[index], options, raw=raw)
                for ended in [number for number, handle in pending.items() if handle.done()]:
                    results[ended] = pending.pop(ended).result()
            results |= {index: handle.result() for index, handle in pending.items()}
        finally:
            for handle in pending.values():
                handle.cancel()  # no effect on those that have ended
        return [results[index] for index in range(len(prompts))]

    def close(self, *, cancel: bool = False) -> None:
        """Accept nothing more, wait for what was accepted, and end the thread.

        Args:
            cancel: end the accepted requests at once, with the finish reason `cancelled`.
        """
        self._queue.close(cancel=cancel)
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:  # but a hook's
            self._thread.join()

    def _prepare(self, prompt: Prompt, options: DecodingOptions, raw: bool) -> Request:
        request = prepare(self._checkpoint, prompt, options, raw=raw)
        length, budget = len(request.prompt_ids), options.max_new_tokens
        if length + budget > self._max_positions:
            raise UserError(
                f"{length} prompt tokens and max_new_tokens {budget} exceed the engine's "
                f"max_positions of {self._max_positions}. Shorten one of them, or raise it."
            )
        return request

    def _new_handle(
        self,
        prompt: Prompt,
        options: DecodingOptions | None,
        raw: bool,
        timeout: float | None,
        logits_hook: LogitsHook | None,
        stop_hook: StopHook | None,
        overrides: dict[str, Any],
    ) -> RequestHandle:
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise UserError(
                f"timeout must be a number of seconds above 0, or None; got {timeout!r}."
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        request = self._prepare(prompt, with_overrides(options, overrides), raw)
        request = replace(request, logits_hook=logits_hook, stop_hook=stop_hook)
        return RequestHandle(next(self._indices), request, deadline, self._queue.cancel)

    # What follows runs in the engine's thread.

    def _drive(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # a mistake of ours; nobody shall wait for ever
            self._queue.close(cancel=False)
            for event in _failed(self._queue.indices(), error):
                self._tell(event)
            raise

    def _turn(self) -> bool:
        """Wait for something to do and do it; False if there is nothing and will be nothing."""
        news = self._queue.take(wait=self._scheduler.is_idle)
        if news is None:
            return False
        arrived, cancelled = news
        for handle in arrived:
            self._scheduler.add(handle.index, handle.request, handle.deadline)
        ended = [self._scheduler.cancel(index) for index in cancelled]
        for event in chain(filter(None, ended), self._scheduler.expire()):
            self._tell(event)
        for event in self._step():
            self._tell(event)
        return True

    def _step(self) -> list[Event]:
        try:
            events = self._scheduler.step()
        except Exception as error:
            without_frames(error)  # before the rows go: the frames hold their cache
            return _failed(self._scheduler.discard_rows(), error)
        for event in events:
            if event.error is not None:
                without_frames(event.error)
        return events

    def _tell(self, event: Event) -> None:
        handle = self._queue.get(event.index)
        if event.result is not None or event.error is not None:
            self._queue.end(event.index)
        handle.put(event)


def _failed(indices: Sequence[int], cause: BaseException) -> list[Event]:
    """Tell requests that the forward has failed, each with an error of its own to raise."""
    events = []
    for index in indices:
        error = ForwardError(
            f"A forward of the model has failed ({type(cause).__name__}: {cause}), and with it the "
            f"{len(indices)} requests that ran. If memory is short, lower max_rows, prefill_chunk "
            "or max_positions."
        )
        error.__cause__ = cause
        events.append(Event(index=index, error=error))
    return events


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} must be an integer of at least 1; got {value!r}.")


def _max_positions(checkpoint: Checkpoint, wanted: int | None) -> int:
    context = checkpoint.context_length
    if wanted is None:
        if context is None:
            raise UserError(
                f"The config of {checkpoint.name!r} does not say how long its context is. Give "
                "max_positions."
            )
        return context
    _check_count("max_positions", wanted)
    if context is not None and wanted > context:
        raise UserError(
            f"max_positions {wanted} is larger than the model's context. Give at most {context}."
        )
    return wanted
