"""What a caller may ask of the decoder, validated once, at the edge."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from mars.errors import UserError

Mode = Literal["exact", "threshold", "ar"]
Layout = Literal["auto", "linear", "partial", "full"]
Confidence = Literal["probability", "entropy", "margin"]

MIN_TEMPERATURE = 1e-3
MOST_LOGPROBS = 20
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How one request is decoded.

    Raises:
        UserError: a value is of the wrong type or outside its range; the message names the field.
    """

    mode: Mode = "exact"
    """`ar`: one token per forward. `exact`: drafts are verified by the next forward, so the text is
    that of `ar`. `threshold`: commit drafts the model is sure of; faster, but changes the text."""
    window: int | None = None
    """Masks per group (W); None takes the checkpoint's block size."""
    threshold: float | None = 0.9
    """tau of the threshold mode. None is the AR mode; so is a probability or a margin >= 1."""
    confidence: Confidence = "probability"
    """What tau is compared with: top-1 probability (>=), entropy in nats (<=), p1 - p2 (>=).

    Of the model's distribution after bias and penalties, before temperature and filters: tau means
    the same for greedy and sampled text."""
    layout: Layout = "auto"
    """Which outcomes of a verification the exact mode has masks for: `linear` only for the one
    that all drafts are right, `full` for every number of right drafts, `partial` for the
    `max_groups` most likely numbers; `auto` feeds, forward by forward, the drafts and masks that
    pay on this machine, down to none."""
    max_groups: int = 3
    """Most groups of masks per forward in the partial layout."""
    ngram: bool = True
    """Whether the exact mode also drafts what followed the last time the text read as now."""
    draft_threshold: float = 0.0
    """In the exact mode, cut drafts that are right with less than this probability, as far as the
    confidences of the draft and those before it tell. 0 keeps all."""
    max_new_tokens: int = 256
    """Most tokens to generate, end-of-sequence included."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are cut from it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, besides the checkpoint's end-of-sequence ids."""
    ignore_eos: bool = False
    """Generate past end-of-sequence tokens."""
    temperature: float = 0.0
    """0 is greedy: the filters below (top_k, top_p, min_p) then do nothing. Otherwise at least
    0.001: smaller ones mean greedy as well, but would divide logits out of the float32 range."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one's probability."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in prompt or answer."""
    presence_penalty: float = 0.0
    """Subtract this from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtract this times the number of times the token was generated."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these token ids."""
    seed: int = 0
    """Noise of the sampler; the same seed gives the same text in any batch, in `ar` and `exact`."""
    logprobs: int | None = None
    """Return the log-probability of every token, and of this many most likely ones in its place,
    under the distribution of `ar`: the model's after bias and penalties, before temperature and
    filters. Not in the threshold mode, which has no such distribution of its drafts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        _check_choice("mode", self.mode, get_args(Mode))
        _check_choice("confidence", self.confidence, get_args(Confidence))
        _check_choice("layout", self.layout, get_args(Layout))
        _check_int("max_groups", self.max_groups, low=1)
        _check_float("draft_threshold", self.draft_threshold, low=0.0, high=1.0)
        if not isinstance(self.ngram, bool):
            raise UserError(f"ngram must be true or false; got {self.ngram!r}.")
        if self.threshold is not None:
            _check_float("threshold", self.threshold, low=0.0)
        if self.window is not None:
            _check_int("window", self.window, low=0)
        _check_int("max_new_tokens", self.max_new_tokens, low=1)
        _check_stops(self.stop, self.stop_token_ids)
        if self.temperature != 0 or isinstance(self.temperature, bool):
            _check_float("temperature (if not 0)", self.temperature, low=MIN_TEMPERATURE)
        _check_int("top_k", self.top_k, low=0)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, low_allowed=False)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, low_allowed=False)
        _check_float("presence_penalty", self.presence_penalty)
        _check_float("frequency_penalty", self.frequency_penalty)
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias key", token_id, low=0)
            _check_float(f"logit_bias[{token_id}]", bias)
        _check_int("seed", self.seed, low=-_INT64, high=_INT64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0, high=MOST_LOGPROBS)
            if self.mode == "threshold" and not self.is_ar:
                raise UserError(
                    "logprobs are those of the AR distribution, which mode 'threshold' does not "
                    "compute for the drafts it commits. Use mode 'exact' or 'ar'."
                )

    @property
    def is_ar(self) -> bool:
        """Whether no draft can ever be committed, whatever the model: the AR mode by any name."""
        if self.mode == "exact":
            return self.window == 0 and not self.ngram
        if self.mode == "ar" or self.threshold is None or self.window == 0:
            return True
        return self.confidence != "entropy" and self.threshold >= 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are chosen without noise."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on which tokens came before, other than through the model."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _as_tuple(value: object) -> tuple:
    """Accept one item where a tuple is meant: tuple("stop") would be four stop strings."""
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise UserError(f"{name} must be an integer of at least {low}{upper}; got {value!r}.")


def _check_float(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_allowed: bool = True,
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    in_range = is_number and math.isfinite(value) and low <= value <= high
    if in_range and (low_allowed or value > low):
        return
    limits = []
    if low > -math.inf:
        limits.append(f"{'at least' if low_allowed else 'greater than'} {low:g}")
    if high < math.inf:
        limits.append(f"at most {high:g}")
    suffix = f", {' and '.join(limits)}" if limits else ""
    raise UserError(f"{name} must be a finite number{suffix}; got {value!r}.")


def _check_stops(strings: tuple, token_ids: tuple) -> None:
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UserError(f"stop must hold non-empty strings; got {string!r}.")
    for token_id in token_ids:
        _check_int("stop_token_ids", token_id, low=0)
