"""What drives a model: admit rows, step them, let finished ones go.

Every row has its own length and its own pace. No row waits for another, and what a row says does
not depend on which others run beside it.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from mars.decoding.decision import Decision
from mars.decoding.plain import decide_made_up, decide_outputs
from mars.decoding.plan import NO_PLAN, RowPlan
from mars.decoding.planner import NOTHING, Candidate, Planner
from mars.decoding.request import Progress, Request
from mars.decoding.row import Event, GuardedHook, Row
from mars.decoding.sampling import History
from mars.decoding.step import StepParams
from mars.decoding.stop import FinishReason
from mars.engine.runner import Runner
from mars.engine.step_times import step_times


class _Waiting(NamedTuple):
    index: int
    request: Request
    deadline: float | None


class Scheduler:
    """Requests that wait and rows that run, one forward at a time. Knows no threads.

    Requests are admitted first come, first served. New ones read their prompts in forwards of their
    own: next to them the others would be mostly padding. Those go first, but for every step of the
    running rows they read at most `prefill_tokens` columns (one row may always read a chunk).

    Row i here is row i of the runner. The first rows have read their prompts; behind them stand
    those that have read a part of theirs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int,
        max_positions: int,
        mask_token_id: int | None = None,
        prefill_chunk: int = 512,
        prefill_tokens: int | None = None,
        all_known: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare for `max_rows` rows of at most `max_positions` tokens each.

        Args:
            model: see `decode`, also for `mask_token_id` and `prefill_chunk`.
            max_rows: rows that run together.
            max_positions: no prompt and answer together may be longer.
            mask_token_id: fed at masks.
            prefill_chunk: longest stretch of a prompt that one forward reads.
            prefill_tokens: most columns, padding included, that prompts take between two steps of
                the running rows; None: no limit.
            all_known: nobody is added after the first step.
            clock: seconds since some moment; deadlines are its times.
        """
        self._new_runner = partial(
            Runner,
            model,
            num_rows=max_rows,
            max_positions=max_positions,
            mask_token_id=mask_token_id,
            prefill_chunk=prefill_chunk,
        )
        self._runner = self._new_runner()
        self._max_rows = max_rows
        self._mask_token_id = mask_token_id
        self._prefill_chunk = prefill_chunk
        self._prefill_tokens = math.inf if prefill_tokens is None else prefill_tokens
        self._all_known = all_known
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._rows: list[Row] = []
        self._num_ready = 0  # rows that have read their prompts
        self._columns_read = 0  # since these last made a step
        self._params: tuple[list[int], StepParams] | None = None
        self._planner: Planner | None = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._rows and not self._waiting

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._rows)

    def add(self, index: int, request: Request, deadline: float | None = None) -> None:
        """Let a request wait for a row; at any time between two steps.

        Args:
            index: what its events are called by, of no other request.
            request: valid for this model, and not longer than `max_positions`.
            deadline: when `expire` ends it.
        """
        self._waiting.append(_Waiting(index, request, deadline))

    def cancel(self, index: int, reason: FinishReason = "cancelled") -> Event | None:
        """End a request now, between two steps, with what it has said.

        Returns:
            Its last event; None if it has ended already.
        """
        for number, row in enumerate(self._rows):
            if row.index == index:
                self._drop(number)
                return self._abort(row, reason)
        for place, waiting in enumerate(self._waiting):
            if waiting.index == index:
                del self._waiting[place]
                return self._abort(self._row(waiting), reason)
        return None

    def expire(self) -> list[Event]:
        """End the requests whose deadline has come; return their last events."""
        now = self._clock()
        late = [
            entry.index
            for entry in chain(self._rows, self._waiting)
            if entry.deadline is not None and entry.deadline <= now
        ]
        events = [self.cancel(index, "timeout") for index in late]
        return [event for event in events if event is not None]

    def discard_rows(self) -> list[int]:
        """Forget all rows and the cache: after a step that has raised, nobody knows their state.

        Returns:
            The indices of their requests, which get no more events. Waiting ones go on waiting.
        """
        lost = [row.index for row in self._rows]
        self._rows, self._num_ready, self._params = [], 0, None
        self._runner = self._new_runner()
        return lost

    def step(self) -> list[Event]:
        """Run one forward and return what it brought, request by request.

        Nothing if there is nothing to do, or if the forward has only read parts of prompts.

        Raises:
            Exception: what the forward has raised, for lack of memory for example. The caller
                gives up, or calls `discard_rows`.
        """
        first = self._num_ready
        count, width = self._choose_readers()
        if count == 0:
            self._columns_read = 0
            return self._decide(0, first) if first else []
        while len(self._rows) < first + count:
            request = self._waiting[0].request
            self._rows.append(self._row(self._waiting.popleft()))
            self._runner.add_row(len(request.prompt_ids) + request.options.max_new_tokens)
        self._columns_read += count * width
        if self._num_unread(first) > self._prefill_chunk:
            self._read(first, count)
            return []
        self._num_ready += count
        if self._runner.has_padding:
            return self._decide(first, count)
        # Running rows come along: the weights are read once for all.
        self._columns_read = 0
        return self._decide(0, first + count)

    def _choose_readers(self) -> tuple[int, int]:
        """Return how many rows read in the next forward, and how many columns the longest takes.

        First those that have read a part, then waiting ones in their order. Together go those that
        need more than a chunk, which do not say anything yet, or those that need no more.
        """
        begun = (self._num_unread(row) for row in range(self._num_ready, len(self._rows)))
        free = self._max_rows - len(self._rows)
        waiting = (len(entry.request.prompt_ids) for entry in islice(self._waiting, free))
        already = self._columns_read if self._num_ready else 0
        count = width = longest = 0
        for length in chain(begun, waiting):
            wider = max(width, min(length, self._prefill_chunk))
            is_first = already + count == 0
            if not is_first and already + (count + 1) * wider > self._prefill_tokens:
                break
            if count and (length > self._prefill_chunk) != (longest > self._prefill_chunk):
                break
            count, width, longest = count + 1, wider, max(longest, length)
        return count, width

    def _num_unread(self, number: int) -> int:
        return len(self._rows[number].progress.tokens) - self._runner.cached[number]

    def _read(self, first: int, count: int) -> None:
        """Read a chunk of `count` prompts that are longer."""
        numbers = range(first, first + count)
        ends = [self._runner.cached[number] + self._prefill_chunk for number in numbers]
        chunks = [
            self._rows[number].progress.tokens[:end]
            for number, end in zip(numbers, ends, strict=True)
        ]
        self._runner.read(first, chunks)

    def _decide(self, first: int, count: int) -> list[Event]:
        """Step `count` rows from `first` on."""
        rows = self._rows[first : first + count]
        progress = [row.progress for row in rows]
        new = sum(self._num_unread(number) > 1 for number in range(first, first + count))
        if self._planner is None and any(row.is_planned_together for row in progress):
            times = step_times(self._runner.model, self._max_rows, decide_made_up)
            self._planner = Planner(times, has_padding=self._runner.has_padding)
        started = time.perf_counter()
        candidates = self._candidates_of(rows, new)
        plans = self._plan(progress, candidates)
        planned = time.perf_counter()
        outputs = self._runner.run(first, [row.tokens for row in progress], plans)
        params = self._params_of(rows, outputs[0])
        histories = self._histories_of(rows, outputs[0]) if params.has_penalties else []
        decisions = decide_outputs(
            *(outputs, self._runner.model, progress, plans, params, histories),
            self._mask_token_id,
        )
        self._runner.keep(first, [decision.num_accepted for decision in decisions])
        # Planning is told apart: at first it reads the prompts.
        seconds = None if new else time.perf_counter() - planned
        self._learn(rows, candidates, plans, decisions, seconds, planned - started)
        events = [self._commit(row, d) for row, d in zip(rows, decisions, strict=True)]
        for number in reversed(range(first, first + count)):
            if self._rows[number].is_over:
                self._drop(number)
        return events

    def _candidates_of(self, rows: Sequence[Row], new: int) -> list[Candidate | None]:
        """Ask the rows in the layout `auto`, unless nothing is going to be fed anyway.

        `new` of them have just come: their prompts are read in this forward.
        """
        are_planned = [row.progress.is_planned_together for row in rows]
        if self._planner is None:
            return [None] * len(rows)
        self._planner.welcome(new, len(rows))
        self._planner.is_closing = self._all_known and not self._waiting
        if not any(are_planned):
            return [None] * len(rows)
        if self._planner.is_pausing():
            return [NOTHING if planned else None for planned in are_planned]
        pairs = zip(rows, are_planned, strict=True)
        return [row.candidate() if planned else None for row, planned in pairs]

    def _plan(
        self, rows: Sequence[Progress], candidates: Sequence[Candidate | None]
    ) -> list[RowPlan]:
        """Plan a forward: the rows in the layout `auto` together, the others for themselves."""
        pairs = zip(rows, candidates, strict=True)
        together = [candidate for candidate in candidates if candidate is not None]
        if not together or together[0] is NOTHING or self._planner is None:
            return [row.plan() if c is None else NO_PLAN for row, c in pairs]
        fixed = [row.plan() if c is None else None for row, c in pairs]
        planned = iter(self._planner.plan(together, [plan for plan in fixed if plan is not None]))
        return [next(planned) if plan is None else plan for plan in fixed]

    def _learn(
        self,
        rows: Sequence[Row],
        candidates: Sequence[Candidate | None],
        plans: Sequence[RowPlan],
        decisions: Sequence[Decision],
        seconds: float | None,
        planning: float,
    ) -> None:
        """Note what was fed, and let the planner and the rows' forecasts learn from it."""
        for row, plan in zip(rows, plans, strict=True):
            if row.progress.request.mode == "exact":
                row.progress.plans[len(plan.drafts), len(plan.groups), plan.window] += 1
        planned = [candidate for candidate in candidates if candidate is not None]
        if self._planner is None or not planned:
            return
        committed = sum(len(decision.tokens) for decision in decisions)
        self._planner.learn(plans, committed, seconds, planning)
        if planned[0] is NOTHING:
            return
        for row, candidate, plan, made in zip(rows, candidates, plans, decisions, strict=True):
            if candidate is not None:
                fed = candidate.drafts[: len(plan.drafts)]
                row.forecast.learn(fed, made.num_accepted, made.drafts)

    def _commit(self, row: Row, decision: Decision) -> Event:
        error = None if row.hook is None else row.hook.error
        if error is None:
            try:
                event = row.commit(decision, self._clock())
                row.is_over = row.progress.is_finished
                return event
            except Exception as raised:  # by the stop hook or the tokenizer
                error = raised
        row.is_over = True
        return Event(index=row.index, error=error)

    def _params_of(self, rows: Sequence[Row], logits: torch.Tensor) -> StepParams:
        indices = [row.index for row in rows]
        if self._params is None or self._params[0] != indices:
            requests = [row.progress.request for row in rows]
            self._params = indices, StepParams.of(requests, logits.shape[-1], logits.device)
        return self._params[1]

    def _histories_of(self, rows: Sequence[Row], logits: torch.Tensor) -> list[History]:
        for row in rows:
            if row.history is None:
                prompt_ids = row.progress.request.prompt_ids
                row.history = History.of(prompt_ids, logits.shape[-1], logits.device)
        return [row.history for row in rows if row.history is not None]

    def _row(self, waiting: _Waiting) -> Row:
        request, hook = waiting.request, None
        if request.logits_hook is not None:
            hook = GuardedHook(request.logits_hook)
            request = replace(request, logits_hook=hook)
        return Row(waiting.index, Progress(request), hook, waiting.deadline, self._clock())

    def _abort(self, row: Row, reason: FinishReason) -> Event:
        row.progress.stop.abort(reason)
        logprobs = None if row.progress.request.options.logprobs is None else []
        return Event(index=row.index, logprobs=logprobs, result=row.result(self._clock()))

    def _drop(self, number: int) -> None:
        """Let a row go: the last one that is ready takes its place, the last of all that one's."""
        if number < self._num_ready:
            self._num_ready -= 1
            if number < self._num_ready < len(self._rows) - 1:
                self._move(self._num_ready, number)
                number = self._num_ready
        self._runner.drop_row(number)  # the last row takes its number
        last = self._rows.pop()
        if number < len(self._rows):
            self._rows[number] = last

    def _move(self, source: int, target: int) -> None:
        """Put a row in the place of another, which is forgotten."""
        self._runner.move_row(source, target)
        self._rows[target] = self._rows[source]
