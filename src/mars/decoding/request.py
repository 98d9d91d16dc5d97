"""A request, the state it has while it runs, and its result."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mars.decoding.drafts import MOST_NGRAM_DRAFTS, Draft, NgramIndex, cut_drafts, merge_drafts
from mars.decoding.options import DecodingOptions, Mode
from mars.decoding.plan import NO_PLAN, RowPlan, plan_exact, plan_threshold
from mars.decoding.stop import Decode, FinishReason, StopChecker, StopRules

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A question, a list of chat messages, or token ids."""

LogitsHook = Callable[[list[int], torch.Tensor], torch.Tensor]
"""(all tokens so far, logits (V,)) -> logits (V,): a processor of another library. It may write
into its argument."""
StopHook = Callable[[list[int]], bool]
"""(all tokens so far) -> whether the last one ends the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything the decoder must know of one sequence."""

    prompt: Prompt
    """The prompt as the caller gave it; only echoed."""
    prompt_ids: list[int]
    """Its tokens, at least one."""
    options: DecodingOptions
    """How to decode it."""
    window: int
    """Masks per group (W); 0: no masks."""
    end_ids: frozenset[int]
    """Token ids that end the text."""
    decode: Decode
    """Turns tokens into text."""
    logits_hook: LogitsHook | None = None
    """Applied to the raw logits of every position, before everything else."""
    stop_hook: StopHook | None = None
    """Asked after every committed token."""

    mode: Mode = field(init=False)
    """`ar` if no draft can be committed, whatever was asked for."""

    def __post_init__(self) -> None:
        options = self.options
        has_drafts = self.window > 0 or (options.mode == "exact" and options.ngram)
        mode = options.mode if has_drafts and not options.is_ar else "ar"
        object.__setattr__(self, "mode", mode)

    @property
    def is_plain(self) -> bool:
        """Whether it asks for nothing but tokens, greedy or sampled."""
        options = self.options
        asks_more = options.has_penalties or options.logit_bias or options.logprobs is not None
        is_odd = self.mode == "threshold" and options.confidence != "probability"
        return not (asks_more or is_odd) and self.logits_hook is None

    @property
    def most_drafts(self) -> int:
        """Drafts that one forward commits at most."""
        if self.mode == "exact" and self.options.ngram:
            return max(self.window, MOST_NGRAM_DRAFTS)
        return self.window if self.mode != "ar" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probabilities (nats) at one place of an answer, under the distribution of `ar`."""

    token_id: int
    """The token that was chosen."""
    logprob: float
    top: dict[int, float]
    """The most likely tokens, likeliest first; the chosen one need not be among them."""


class DraftOutcome(NamedTuple):
    """What became of a mask's draft, the drafts before which were right."""

    offset: int
    """Place of the mask in its group, from 1."""
    confidence: float
    """Top-1 probability the draft had."""
    is_right: bool
    """Whether it was what `ar` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one prompt."""

    prompt: Prompt
    """The prompt as given."""
    prompt_tokens: int
    text: str
    """The answer, without special tokens and without the stop string that ended it. If it was
    ended from outside: what was certain by then, so it may lack the end of what the tokens say."""
    token_ids: list[int]
    """The tokens of the answer, the one that ended it included."""
    finish_reason: FinishReason
    """`stop`: an end token or a stop string; `length`: max_new_tokens; `cancelled` or `timeout`:
    ended from outside, with the tokens it had by then."""
    stop_reason: int | str | None
    """The token id or the stop string that ended it."""
    mode: Mode
    """`ar` if no draft could be committed, whatever was asked for."""
    forwards: int
    """Forwards that committed tokens of this row; those that only read the prompt do not."""
    tokens_per_forward: float
    """0 if there was no forward."""
    acceptance_histogram: list[int]
    """Entry k: forwards that committed k tokens, k = 0 .. 1 + the most drafts of a forward."""
    plans: dict[str, int]
    """Of the exact mode: how many forwards fed what, as `drafts+groupsxwindow`: `4+2x3` is four
    drafts and two groups of three masks."""
    draft_outcomes: list[DraftOutcome]
    """Of the exact mode: the drafts of masks up to and including the first wrong one of a step."""
    logprobs: list[TokenLogprob] | None
    """One per token, if they were asked for."""
    prefill_seconds: float
    """From the start of this row to its first tokens."""
    decode_seconds: float
    """From its first tokens to its last."""
    seconds: float
    """The sum of both."""


@dataclass(slots=True)
class Progress:
    """The answer of one request as far as it has come: the host's side of a running row.

    Attributes:
        tokens: prompt and answer; the decoder feeds from here.
        stop: decides when the text ends.
        histogram: forwards by number of committed tokens.
        drafts: what the masks of the last forward predict to come next.
        plans: how many forwards fed so many drafts, groups, and masks per group.
        outcomes: of earlier drafts of masks.
        logprobs: of the tokens of the answer, if they were asked for.
    """

    request: Request
    tokens: list[int] = field(init=False)
    stop: StopChecker = field(init=False)
    histogram: list[int] = field(init=False)
    drafts: Sequence[Draft] = field(default=(), init=False)
    plans: Counter[tuple[int, int, int]] = field(default_factory=Counter, init=False)
    outcomes: list[DraftOutcome] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    _ngrams: NgramIndex | None = field(init=False)
    _pieces: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        options = self.request.options
        rules = StopRules(
            token_ids=self.request.end_ids,
            strings=options.stop,
            max_new_tokens=options.max_new_tokens,
        )
        self.tokens = list(self.request.prompt_ids)
        self.stop = StopChecker(rules, self.request.decode)
        self.histogram = [0] * (self.request.most_drafts + 2)
        has_ngrams = self.request.mode == "exact" and options.ngram
        self._ngrams = NgramIndex(self.tokens) if has_ngrams else None

    @property
    def is_finished(self) -> bool:
        """Whether the text has ended."""
        return self.stop.finish_reason is not None

    @property
    def is_planned_together(self) -> bool:
        """Whether what the next forward feeds depends on what it costs (layout `auto`)."""
        request, is_first = self.request, self.stop.num_tokens == 0
        return request.mode == "exact" and request.options.layout == "auto" and not is_first

    @property
    def budget(self) -> int:
        """Tokens that may still be committed."""
        return self.request.options.max_new_tokens - self.stop.num_tokens

    def ngram_drafts(self) -> tuple[Draft, ...]:
        """Return what the text suggests to come next."""
        return self._ngrams.draft(self.budget - 1) if self._ngrams else ()

    def drafts_at_hand(self, ngram: Sequence[Draft]) -> tuple[Draft, ...]:
        """Return what masks and `ngram_drafts` suggest to come next."""
        drafts = merge_drafts(self.drafts, ngram)
        return cut_drafts(drafts, self.request.options.draft_threshold, self.budget - 1)

    def plan(self) -> RowPlan:
        """Plan the next forward for itself."""
        options, window = self.request.options, self.request.window
        is_first = self.stop.num_tokens == 0
        if self.request.mode == "ar" or (self.request.mode == "exact" and is_first):
            # The prompt is read by the same forward in both modes: in half precision, products of
            # other shapes would leave other bits in the cache.
            return NO_PLAN
        if self.request.mode == "threshold":
            return plan_threshold(window=window, budget=self.budget)
        return plan_exact(
            self.drafts_at_hand(self.ngram_drafts()),
            window=window,
            budget=self.budget,
            layout=options.layout,
            max_groups=options.max_groups,
        )

    def commit(
        self,
        tokens: Sequence[int],
        drafts: Sequence[Draft] = (),
        logprobs: Sequence[TokenLogprob] = (),
    ) -> str:
        """Append the tokens of one forward up to the end of the text; return the new text.

        Args:
            tokens: at least one.
            drafts: what comes next, by the masks of that forward.
            logprobs: of the tokens, or none.
        """
        before = len(self.tokens)
        text = "".join(self._push(token) for token in tokens if not self.is_finished)
        kept = len(self.tokens) - before
        self.histogram[kept] += 1
        self._pieces.append(text)
        self.outcomes += _outcomes(self.drafts, self.tokens[before:])
        self.drafts = drafts
        self.logprobs += logprobs[:kept]
        return text

    def result(self, prefill_seconds: float, decode_seconds: float) -> Result:
        """Summarise the finished row."""
        assert self.stop.finish_reason is not None, "still running"
        prompt_tokens = len(self.request.prompt_ids)
        token_ids = self.tokens[prompt_tokens:]
        forwards = sum(self.histogram)
        return Result(
            prompt=self.request.prompt,
            prompt_tokens=prompt_tokens,
            text="".join(self._pieces),
            token_ids=token_ids,
            finish_reason=self.stop.finish_reason,
            stop_reason=self.stop.stop_reason,
            mode=self.request.mode,
            forwards=forwards,
            tokens_per_forward=len(token_ids) / forwards if forwards else 0.0,
            acceptance_histogram=self.histogram,
            plans={f"{k}+{g}x{w}": n for (k, g, w), n in self.plans.most_common()},
            draft_outcomes=self.outcomes,
            logprobs=None if self.request.options.logprobs is None else self.logprobs,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            seconds=prefill_seconds + decode_seconds,
        )

    def _push(self, token: int) -> str:
        self.tokens.append(token)
        if self._ngrams is not None:
            self._ngrams.push(token)
        hook = self.request.stop_hook
        return self.stop.push(token, last=hook is not None and hook(self.tokens))


def _outcomes(drafts: Sequence[Draft], tokens: Sequence[int]) -> Iterator[DraftOutcome]:
    """Compare drafts with what was said; behind the first wrong one nothing can be said."""
    for offset, (draft, token) in enumerate(zip(drafts, tokens, strict=False), start=1):
        is_right = draft.token == token
        yield DraftOutcome(offset, draft.confidence, is_right)
        if not is_right:
            return
