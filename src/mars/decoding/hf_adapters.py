"""Logits processors and stopping criteria of `transformers`, for a decoder of single rows.

Those that our sampler and stop rules know become options; the others become hooks that see one
row and one position at a time. What needs the whole batch is refused.

`generate` puts temperature and filters last, where our sampler applies them itself. That matters:
they have no part in the confidence of a draft, which hooks have.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mars.decoding.request import LogitsHook, StopHook
from mars.errors import UserError

# Processors that our sampler knows, in the order in which it applies them.
_SAMPLER: dict[type, Callable[[Any], dict[str, Any]]] = {
    RepetitionPenaltyLogitsProcessor: lambda p: {"repetition_penalty": p.penalty},
    TemperatureLogitsWarper: lambda p: {"temperature": p.temperature},
    TopKLogitsWarper: lambda p: {"top_k": p.top_k},
    TopPLogitsWarper: lambda p: {"top_p": p.top_p},
    MinPLogitsWarper: lambda p: {"min_p": p.min_p},
}
# These need the whole batch, the number of the row, past scores or a second model.
_NOT_BY_ROW = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "ConfidenceCriteria",
}


def refuse_whole_batch(functions: Sequence[object]) -> None:
    """Raise UserError for a processor or criterion that cannot work on a row by itself."""
    for function in functions:
        name = type(function).__name__
        if name in _NOT_BY_ROW:
            raise UserError(
                f"custom_generate cannot honour {name}: it does not work on one row at a time. "
                "Remove the setting that adds it."
            )


def split_off_sampler(processors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split off the processors, at the end of the list, that our sampler applies in that order.

    Returns:
        The others, and what was split off as fields of `DecodingOptions`.
    """
    others = list(processors)
    settings: dict[str, Any] = {}
    known = list(_SAMPLER)
    while others and type(others[-1]) in known and not _counts_part_of_prompt(others[-1]):
        processor = others.pop()
        settings |= _SAMPLER[type(processor)](processor)
        known = known[: known.index(type(processor))]  # only these may stand before it
    return others, settings


def logits_hook(processors: Sequence[Any], padding_ids: list[int], row: int) -> LogitsHook | None:
    """Apply the processors to one row, whose ids they see with its left padding; None for none."""
    if not processors:
        return None
    of_row = LogitsProcessorList(_for_row(processor, row) for processor in processors)

    def hook(tokens: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        input_ids: Any = torch.tensor([padding_ids + tokens], device=logits_V.device)
        scores: Any = logits_V[None]
        return of_row(input_ids, scores)[0]

    return hook


def end_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    """Collect the end-of-sequence ids."""
    found = [c.eos_token_id.tolist() for c in criteria if isinstance(c, EosTokenCriteria)]
    return frozenset(token for ids in found for token in ids)


def max_length(criteria: StoppingCriteriaList) -> int:
    """Return the greatest length, padding and prompt included; `generate` always sets one."""
    return min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))


def stop_hook(criteria: StoppingCriteriaList, padding_ids: list[int]) -> StopHook | None:
    """Ask the criteria that are not about ends and lengths; None if there are none."""
    others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
    if not others:
        return None

    def hook(tokens: list[int]) -> bool:
        input_ids = torch.tensor([padding_ids + tokens])
        return any(_is_met(criterion, input_ids) for criterion in others)

    return hook


def _is_met(criterion: Any, input_ids: torch.Tensor) -> bool:
    try:
        return bool(torch.as_tensor(criterion(input_ids, None)).all())
    except Exception as error:
        raise UserError(
            f"custom_generate asks stopping criteria about one row at a time and without scores; "
            f"{type(criterion).__name__} failed on that: {error!r}. Decode one prompt at a time, "
            "or remove it."
        ) from error


def _counts_part_of_prompt(processor: object) -> bool:
    """Whether a repetition penalty skips real tokens of the prompt, which ours never does."""
    skipped = getattr(processor, "prompt_ignore_length", None)
    return isinstance(skipped, int) and skipped > 0


def _for_row(processor: Any, row: int) -> Any:
    """Cut what `generate` prepared for the whole batch to one row."""
    skipped = getattr(processor, "prompt_ignore_length", None)
    if isinstance(skipped, torch.Tensor):  # the padding of every row
        return type(processor)(processor.penalty, prompt_ignore_length=int(skipped[row]))
    return processor
