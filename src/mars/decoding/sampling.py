"""From logits to tokens: penalties, temperature, filters, and the choice itself.

Pure tensor functions, in the order and with the semantics of `transformers`: bias, repetition
penalty, presence and frequency penalty (`penalise`), temperature, top-k, top-p, min-p (`choose`).
The token at position t is argmax(filtered logits + Gumbel noise of (seed, t)), which is a sample
of their softmax. Confidence is measured between the two: temperature and filters, which can make
any distribution look certain, have no part in it.

Shapes: B rows, C columns (positions of one step), V vocabulary. A setting that no row uses is
None, and its work is not done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mars.counter import gumbel
from mars.decoding.options import DecodingOptions

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling settings of B rows as tensors that broadcast over (B, C, V)."""

    bias: torch.Tensor | None = None  # (B, 1, V)
    repetition_penalty: torch.Tensor | None = None  # this and all below: (B, 1, 1)
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    largest_top_k: int = 0  # known here: asking the device would make the host wait
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    sampled_rows: torch.Tensor | None = None  # int64, (number of rows that are not greedy,)

    @classmethod
    def of(
        cls, options: Sequence[DecodingOptions], vocabulary: int, device: torch.device | str = "cpu"
    ) -> "SamplingParams":
        """Gather the settings of the rows' options."""

        def column(values: Iterable[float], neutral: float) -> torch.Tensor | None:
            values = list(values)
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, device=device)[:, None, None]

        def filters(name: str, neutral: float) -> torch.Tensor | None:
            # Greedy rows take no filter: the most likely token always stays.
            return column((neutral if o.is_greedy else getattr(o, name) for o in options), neutral)

        sampled = [row for row, o in enumerate(options) if not o.is_greedy]
        return cls(
            bias=_bias(options, vocabulary, device),
            repetition_penalty=column((float(o.repetition_penalty) for o in options), 1.0),
            presence_penalty=column((float(o.presence_penalty) for o in options), 0.0),
            frequency_penalty=column((float(o.frequency_penalty) for o in options), 0.0),
            temperature=column((float(o.temperature) or 1.0 for o in options), 1.0),
            top_k=filters("top_k", 0),
            largest_top_k=max((o.top_k for o in options if not o.is_greedy), default=0),
            top_p=filters("top_p", 1.0),
            min_p=filters("min_p", 0.0),
            seed=torch.tensor([o.seed for o in options], device=device)[:, None, None],
            sampled_rows=torch.tensor(sampled, device=device) if sampled else None,
        )


@dataclass(frozen=True, slots=True)
class History:
    """What penalties look at: the tokens of the prompt and of the answer of B rows."""

    in_prompt_BV: torch.Tensor
    """bool."""
    count_BV: torch.Tensor
    """float32, how often each token was generated."""

    @classmethod
    def of(cls, prompt: Sequence[int], vocabulary: int, device: torch.device | str) -> "History":
        """Start the history of one row (B = 1)."""
        in_prompt = torch.zeros(1, vocabulary, dtype=torch.bool, device=device)
        in_prompt[0, torch.tensor(prompt, device=device)] = True
        return cls(in_prompt, torch.zeros(1, vocabulary, device=device))

    @classmethod
    def stack(cls, rows: Sequence["History"]) -> "History":
        """Copy the histories of several rows into one."""
        return cls(
            torch.cat([row.in_prompt_BV for row in rows]), torch.cat([row.count_BV for row in rows])
        )

    def copy(self) -> "History":
        """Return one that can be added to without changing this."""
        return History(self.in_prompt_BV, self.count_BV.clone())

    def add(self, tokens_BC: torch.Tensor) -> None:
        """Count generated tokens (int64; negative ones are none), in place."""
        self.count_BV.scatter_add_(1, tokens_BC.clamp(min=0), (tokens_BC >= 0).float())


def penalise(
    logits_BCV: torch.Tensor, params: SamplingParams, history: History | None = None
) -> torch.Tensor:
    """Apply bias and penalties: the softmax of the result is the model's distribution (T = 1).

    `history`, needed for penalties only, holds the tokens before every one of the C columns:
    where penalties depend on earlier columns, call this with one column at a time.
    """
    logits = logits_BCV
    if params.bias is not None:
        logits = logits.float() + params.bias
    if history is not None:
        logits = _apply_penalties(logits.float(), params, history)
    return logits


def log_probabilities(
    penalised_BCV: torch.Tensor, choice_BC: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities in nats of the choices and of the most likely tokens.

    Args:
        penalised_BCV: result of `penalise`.
        choice_BC: int64.
        num_top: N, how many of the most likely tokens.

    Returns:
        float32 (B, C) of the choices, float32 (B, C, N) of the top tokens in falling order, and
        their ids, int64 (B, C, N).
    """
    log_BCV = penalised_BCV.float().log_softmax(-1)
    top = log_BCV.topk(num_top, dim=-1)
    return log_BCV.gather(-1, choice_BC[..., None])[..., 0], top.values, top.indices


def filter_logits(logits_BCV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply temperature and filters, for rows that sample; tokens filtered out are -inf."""
    logits = logits_BCV.float()
    if params.temperature is not None:
        logits = logits / params.temperature
    if params.top_k is not None:
        logits = _keep_top_k(logits, params.top_k, params.largest_top_k)
    if params.top_p is not None:
        logits = _keep_top_p(logits, params.top_p)
    if params.min_p is not None:
        logits = _keep_min_p(logits, params.min_p)
    return logits


def choose(
    logits_BCV: torch.Tensor,
    params: SamplingParams,
    position_BC: torch.Tensor,
    ids_BCV: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose a token for every column.

    Args:
        logits_BCV: result of `penalise`.
        params: settings of the rows.
        position_BC: int64, position of the token in its sequence, prompt included: the noise's
            coordinate, so that a token does not depend on the step that chose it.
        ids_BCV: int64, the token ids that the logits belong to, if not 0 .. V-1.

    Returns:
        int64 (B, C), indices into the last dimension.
    """
    choice_BC = logits_BCV.argmax(-1)
    rows = params.sampled_rows
    if rows is not None:
        assert params.seed is not None
        if ids_BCV is None:
            ids = torch.arange(logits_BCV.shape[-1], device=logits_BCV.device)
        else:
            ids = ids_BCV[rows]
        noise = gumbel(params.seed[rows], position_BC[rows, :, None], ids)
        choice_BC[rows] = noise.add_(filter_logits(logits_BCV, params)[rows]).argmax(-1)
    return choice_BC


def _bias(
    options: Sequence[DecodingOptions], vocabulary: int, device: torch.device | str
) -> torch.Tensor | None:
    if not any(o.logit_bias for o in options):
        return None
    bias = torch.zeros(len(options), 1, vocabulary)
    for row, o in enumerate(options):
        for token_id, value in o.logit_bias.items():
            bias[row, 0, token_id] = value
    return bias.to(device)


def _apply_penalties(
    logits: torch.Tensor, params: SamplingParams, history: History
) -> torch.Tensor:
    count = history.count_BV[:, None]
    if params.repetition_penalty is not None:
        penalty = params.repetition_penalty
        seen = history.in_prompt_BV[:, None] | (count > 0)
        logits = torch.where(
            seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits
        )
    if params.presence_penalty is not None:
        logits = logits - params.presence_penalty * (count > 0)
    if params.frequency_penalty is not None:
        logits = logits - params.frequency_penalty * count
    return logits


def _keep_top_k(logits: torch.Tensor, top_k: torch.Tensor, largest: int) -> torch.Tensor:
    """Keep the k largest (and ties with the k-th, as `transformers` does); k = 0 keeps all."""
    vocabulary = logits.shape[-1]
    top = logits.topk(min(largest, vocabulary), dim=-1).values
    rank = (top_k.clamp(1, vocabulary) - 1).expand(-1, logits.shape[1], 1)
    smallest_kept = top.gather(-1, rank)
    return logits.masked_fill((logits < smallest_kept) & (top_k > 0), MINUS_INFINITY)


def _keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities add up to p; p = 1 keeps all."""
    ascending, order = logits.sort(dim=-1)
    dropped = (ascending.softmax(-1).cumsum(-1) <= 1 - top_p) & (top_p < 1)
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), MINUS_INFINITY)


def _keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep the tokens at least min_p times as likely as the most likely one."""
    # A ratio of probabilities is a difference of logits: no softmax needed. log(0) = -inf.
    floor = logits.amax(-1, keepdim=True) + min_p.log()
    return logits.masked_fill(logits < floor, MINUS_INFINITY)
