"""A running row: the answer of a request while it grows, and the news of it."""

from dataclasses import dataclass, field

import torch

from mars.decoding.decision import Decision
from mars.decoding.forecast import Forecast
from mars.decoding.planner import Candidate
from mars.decoding.request import LogitsHook, Progress, Result, TokenLogprob
from mars.decoding.sampling import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """News of one request: after a forward, or because it was ended from outside."""

    index: int
    """Which request."""
    text: str = ""
    """New text; may be empty."""
    token_ids: list[int] = field(default_factory=list)
    """Newly committed tokens, at least one; none if the request was ended or has failed."""
    logprobs: list[TokenLogprob] | None = None
    """One per new token, if they were asked for."""
    result: Result | None = None
    """Set by the last event of a request."""
    error: Exception | None = None
    """Set in place of a result if the request's own hook or text decoder has raised this."""


class GuardedHook:
    """A logits hook whose failure is put aside: the other rows of the forward go on."""

    def __init__(self, hook: LogitsHook) -> None:
        self._hook = hook
        self.error: Exception | None = None

    def __call__(self, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Return what the hook returns; once it has failed, the logits as they are."""
        if self.error is not None:
            return logits
        try:
            changed = self._hook(tokens, logits)
            if changed.shape != logits.shape:
                raise ValueError(
                    f"a logits hook must return a tensor of shape {tuple(logits.shape)}; got "
                    f"{tuple(changed.shape)}."
                )
        except Exception as error:
            self.error = error
            return logits
        return changed


@dataclass(slots=True)
class Row:
    """A request that runs. Times are those of the scheduler's clock, in seconds."""

    index: int
    """Which request."""
    progress: Progress
    hook: GuardedHook | None
    """The request's logits hook."""
    deadline: float | None
    started: float
    first_tokens: float | None = None
    """When they came."""
    history: History | None = None
    """What penalties look at; made when they are first needed."""
    is_over: bool = False
    """Whether it has ended or failed."""
    forecast: Forecast = field(init=False)
    """What its drafts are worth."""

    def __post_init__(self) -> None:
        self.forecast = Forecast.at_temperature(self.progress.request.options.temperature)

    def candidate(self) -> Candidate:
        """Say what the row could feed."""
        progress = self.progress
        ngram = progress.ngram_drafts()
        self.forecast.see(ngram)
        drafts = progress.drafts_at_hand(ngram)
        return Candidate(drafts, progress.request.window, progress.budget, self.forecast)

    def commit(self, decision: Decision, now: float) -> Event:
        """Append the tokens of one forward and tell the news."""
        progress = self.progress
        before, logprobs_before = len(progress.tokens), len(progress.logprobs)
        text = progress.commit(decision.tokens, decision.drafts, decision.logprobs)
        kept = progress.tokens[before:]
        if self.history is not None:
            self.history.add(torch.tensor([kept], device=self.history.count_BV.device))
        if self.first_tokens is None:
            self.first_tokens = now
        asked = progress.request.options.logprobs is not None
        return Event(
            index=self.index,
            text=text,
            token_ids=kept,
            logprobs=progress.logprobs[logprobs_before:] if asked else None,
            result=self.result(now) if progress.is_finished else None,
        )

    def result(self, now: float) -> Result:
        """Summarise a row that has ended."""
        first_tokens = now if self.first_tokens is None else self.first_tokens
        return self.progress.result(first_tokens - self.started, now - first_tokens)
