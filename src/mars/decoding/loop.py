"""The loop that drives a model: admit rows, step them, let finished ones go.

Every row has its own length and its own pace. No row waits for another, and what a row says does
not depend on which others run beside it.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from mars.decoding.decision import Decision
from mars.decoding.request import Progress, Request, Result, TokenLogprob
from mars.decoding.sampling import History
from mars.decoding.step import StepParams, decide
from mars.engine.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """News of one row after one forward."""

    index: int
    """Which request."""
    text: str
    """New text; may be empty."""
    token_ids: list[int]
    """Newly committed tokens, at least one."""
    logprobs: list[TokenLogprob] | None
    """One per new token, if they were asked for."""
    result: Result | None
    """Set by the last event of a request."""


@dataclass(slots=True)
class _Row:
    index: int
    progress: Progress
    history: History | None = None
    started: float = field(default_factory=time.perf_counter)
    first_tokens: float | None = None


def decode(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    mask_token_id: int | None = None,
    batch_size: int = 8,
    prefill_chunk: int = 512,
) -> Iterator[Event]:
    """Decode requests, at most `batch_size` at a time; yield what happens as it happens.

    Args:
        model: a stock causal language model in eval mode.
        requests: valid for this model (`generate` sees to that).
        mask_token_id: fed at masks, never committed; None for a model without one, and for an
            adapter with embeddings of its own.
        batch_size: rows that run together. A row that ends makes room for the next request.
        prefill_chunk: longest stretch of a prompt that one forward reads.
    """
    if not requests:
        return
    decoder = _Decoder(model, requests, mask_token_id, batch_size, prefill_chunk)
    while not decoder.is_done:
        yield from decoder.advance()


class _Decoder:
    """The rows that run, and the requests that wait. Row i here is row i of the runner."""

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        mask_token_id: int | None,
        batch_size: int,
        prefill_chunk: int,
    ) -> None:
        self._waiting = deque(enumerate(requests))
        self._rows: list[_Row] = []
        self._num_rows = min(batch_size, len(requests))
        self._mask_token_id = mask_token_id
        self._params: tuple[list[int], StepParams] | None = None
        self._runner = Runner(
            model,
            num_rows=self._num_rows,
            max_positions=max(len(r.prompt_ids) + r.options.max_new_tokens for r in requests),
            mask_token_id=mask_token_id,
            prefill_chunk=prefill_chunk,
        )

    @property
    def is_done(self) -> bool:
        return not self._rows and not self._waiting

    def advance(self) -> list[Event]:
        """Take one step: of the new rows alone if there are any, else of all rows.

        New rows have prompts to read; next to them the others would be mostly padding.
        """
        first = len(self._rows)
        while self._waiting and len(self._rows) < self._num_rows:
            index, request = self._waiting.popleft()
            self._rows.append(_Row(index, Progress(request)))
            self._runner.add_row()
        return self._step(first if first < len(self._rows) else 0)

    def _step(self, first: int) -> list[Event]:
        """Step the rows from `first` on."""
        rows = self._rows[first:]
        progress = [row.progress for row in rows]
        plans = [row.plan() for row in progress]
        real, masks = self._runner.forward(first, [row.tokens for row in progress], plans)
        params = self._params_of(rows, real)
        histories = self._histories_of(rows, real) if params.has_penalties else []
        decisions = decide(
            *(real, masks, progress, plans, params, histories),
            *(self._mask_token_id, self._runner.correction),
        )
        self._runner.keep(first, [decision.num_accepted for decision in decisions])
        events = [_commit(row, decision) for row, decision in zip(rows, decisions, strict=True)]
        self._drop_finished()
        return events

    def _params_of(self, rows: Sequence[_Row], logits: torch.Tensor) -> StepParams:
        indices = [row.index for row in rows]
        if self._params is None or self._params[0] != indices:
            requests = [row.progress.request for row in rows]
            self._params = indices, StepParams.of(requests, logits.shape[-1], logits.device)
        return self._params[1]

    def _histories_of(self, rows: Sequence[_Row], logits: torch.Tensor) -> list[History]:
        for row in rows:
            if row.history is None:
                prompt_ids = row.progress.request.prompt_ids
                row.history = History.of(prompt_ids, logits.shape[-1], logits.device)
        return [row.history for row in rows if row.history is not None]

    def _drop_finished(self) -> None:
        for number in reversed(range(len(self._rows))):
            if self._rows[number].progress.is_finished:
                self._runner.drop_row(number)
                last = self._rows.pop()
                if number < len(self._rows):  # as the runner does, the last row moves up
                    self._rows[number] = last


def _commit(row: _Row, decision: Decision) -> Event:
    """Append the tokens of one forward to a row and tell the news."""
    progress = row.progress
    before, logprobs_before = len(progress.tokens), len(progress.logprobs)
    text = progress.commit(decision.tokens, decision.drafts, decision.logprobs)
    kept = progress.tokens[before:]
    if row.history is not None:
        row.history.add(torch.tensor([kept], device=row.history.count_BV.device))
    now = time.perf_counter()
    row.first_tokens = row.first_tokens or now
    result = None
    if progress.is_finished:
        result = progress.result(row.first_tokens - row.started, now - row.first_tokens)
    asked = progress.request.options.logprobs is not None
    return Event(
        index=row.index,
        text=text,
        token_ids=kept,
        logprobs=progress.logprobs[logprobs_before:] if asked else None,
        result=result,
    )
