"""MARS inside `transformers`: `model.generate(..., custom_generate=mars.custom_generate)`.

`transformers` prepares inputs, processors and stopping criteria; every row is then decoded by
itself and the rows are put together again. What cannot be honoured is refused, never ignored.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from mars.checkpoint import MarsConfig, check_supported
from mars.decoding import hf_adapters
from mars.decoding.limits import check_context, check_token_ids, resolve_window
from mars.decoding.loop import decode
from mars.decoding.options import Confidence, DecodingOptions, Layout, Mode
from mars.decoding.request import Request
from mars.errors import UserError

# Settings of another way to search or of another type of result, with the value that is off.
_UNSUPPORTED_CONFIG = {
    "num_beams": 1,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "penalty_alpha": None,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
}
# `generate` sets these itself; they say nothing that is not known here.
_HARMLESS = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "cache_position"}
_CACHES = ("cache", "past_key_values")
_NOT_GIVEN: Any = object()


# `attention_mask` must stay inside **model_kwargs: `generate` does not prepare what a custom
# function names in its signature.
def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    mode: Mode | None = None,
    threshold: float | None = _NOT_GIVEN,
    confidence: Confidence = "probability",
    window: int | None = None,
    layout: Layout = "auto",
    ngram: bool = True,
    draft_threshold: float = 0.0,
    seed: int | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Decode for `model.generate`, which calls this and passes on the keyword arguments.

    Stopping criteria are asked, and logits processors applied, one row and one position at a
    time; they must be functions of (input_ids, scores) without memory. Criteria get no scores.
    A processor's effect counts in the confidence of drafts, except that of temperature, top-k,
    top-p and min-p where `generate` puts them: last.

    Limits: `generate` keeps some of its arguments from a custom function, which can then neither
    honour nor refuse them. `assistant_model` and `assistant_tokenizer` have no effect; a `streamer`
    gets the prompt, then nothing (use `mars.stream`); `tokenizer` is dropped, so `stop_strings`
    fails for lack of one: pass `StopStringCriteria(tokenizer, [...])` in `stopping_criteria`.

    Args:
        model: a stock model. One whose config has no `mars` block drafts from n-grams alone.
        input_ids: int64 (B, T), left-padded.
        logits_processor: prepared by `generate`.
        stopping_criteria: prepared by `generate`.
        generation_config: prepared by `generate`.
        mode: see `DecodingOptions`, as for all below; None is `threshold` if a threshold is given,
            else `exact`.
        threshold: tau.
        confidence: what tau is compared with.
        window: masks per group.
        layout: which outcomes have a group of masks.
        ngram: also draft what followed before.
        draft_threshold: cut drafts less likely than this to be right.
        seed: noise of the sampler, seed + b in row b; None draws one from torch's generator.
        **model_kwargs: the attention mask, and what `generate` adds.

    Returns:
        int64 (B, longest), prompts included; rows that ended earlier are padded on the right.

    Raises:
        UserError: the call asks for something that this decoder does not do.
    """
    _refuse(model, generation_config, model_kwargs, [*logits_processor, *stopping_criteria])
    does_sample = bool(generation_config.do_sample)
    hooked, native = hf_adapters.split_off_sampler(logits_processor)
    sampler: dict[str, Any] = {"temperature": float(does_sample)} | native
    is_given = threshold is not _NOT_GIVEN
    if is_given:
        sampler["threshold"] = threshold
    options = DecodingOptions(
        mode=mode or ("threshold" if is_given else DecodingOptions().mode),
        confidence=confidence,
        window=window,
        layout=layout,
        ngram=ngram,
        draft_threshold=draft_threshold,
        max_new_tokens=hf_adapters.max_length(stopping_criteria) - input_ids.shape[1],
        seed=_draw_seed() if does_sample and seed is None else seed or 0,
        **sampler,
    )
    mars = MarsConfig.from_config(model.config)
    requests = [
        replace(
            _request(model, prompt_ids, replace(options, seed=options.seed + row), mars),
            end_ids=hf_adapters.end_ids(stopping_criteria),
            logits_hook=hf_adapters.logits_hook(hooked, padding_ids, row),
            stop_hook=hf_adapters.stop_hook(stopping_criteria, padding_ids),
        )
        for row, (padding_ids, prompt_ids) in enumerate(_split_padding(input_ids, model_kwargs))
    ]
    return _append(input_ids, _answers(model, requests, mars), generation_config)


def _answers(
    model: PreTrainedModel, requests: list[Request], mars: MarsConfig | None
) -> list[list[int]]:
    mask_token_id = None if mars is None else mars.mask_token_id
    events = decode(model, requests, mask_token_id=mask_token_id, batch_size=len(requests))
    results = {event.index: event.result for event in events if event.result is not None}
    return [results[row].token_ids for row in range(len(requests))]


def _refuse(
    model: PreTrainedModel, config: GenerationConfig, kwargs: dict[str, Any], hooks: list[Any]
) -> None:
    """Refuse what the decoder would have to ignore."""
    check_supported(model.config)
    _refuse_config(config)
    _refuse_kwargs(kwargs)
    hf_adapters.refuse_whole_batch(hooks)


def _refuse_config(config: GenerationConfig) -> None:
    for name, off in _UNSUPPORTED_CONFIG.items():
        value = getattr(config, name, off)
        if value is not None and value != off:
            raise UserError(f"custom_generate cannot honour {name}={value!r}. Leave it out.")


def _refuse_kwargs(kwargs: dict[str, Any]) -> None:
    for name in _CACHES:
        cache = kwargs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise UserError(f"custom_generate starts from the prompt, not from a filled {name}.")
    for name, value in kwargs.items():
        if value is not None and name not in _HARMLESS and name not in _CACHES:
            raise UserError(f"custom_generate does not know the argument {name}. Leave it out.")


def _draw_seed() -> int:
    """Draw from torch's global generator: `torch.manual_seed` then makes sampling repeatable."""
    return int(torch.randint(1 << 62, ()))


def _split_padding(
    input_ids: torch.Tensor, kwargs: dict[str, Any]
) -> list[tuple[list[int], list[int]]]:
    """Split every row into its left padding and its prompt."""
    mask = kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if not bool((mask.diff(dim=1) >= 0).all()) or not bool(mask[:, -1:].all()):
        raise UserError("Prompts must be padded on the left: set tokenizer.padding_side='left'.")
    positions = kwargs.get("position_ids")
    counted = mask.cumsum(1) - 1
    if positions is not None and bool(((positions.to(mask.device) != counted) & (mask == 1)).any()):
        raise UserError("custom_generate counts positions from 0. Leave position_ids out.")
    lengths = (mask == 0).sum(1).tolist()
    return [(row[:n], row[n:]) for row, n in zip(input_ids.tolist(), lengths, strict=True)]


def _request(
    model: PreTrainedModel, prompt_ids: list[int], options: DecodingOptions, mars: MarsConfig | None
) -> Request:
    check_token_ids(prompt_ids, options, model.config.vocab_size)
    context = getattr(model.config, "max_position_embeddings", None)
    check_context(len(prompt_ids), options.max_new_tokens, context)
    return Request(
        prompt=prompt_ids,
        prompt_ids=prompt_ids,
        options=options,
        window=resolve_window(options, mars),
        end_ids=frozenset(),
        decode=lambda ids: "",
    )


def _append(
    input_ids: torch.Tensor, answers: list[list[int]], config: GenerationConfig
) -> torch.Tensor:
    """Append the answers to the prompts, padded on the right."""
    longest = max(map(len, answers))
    pad = config.pad_token_id
    if pad is None:
        if any(len(answer) < longest for answer in answers):
            raise UserError("Rows of different lengths need a pad_token_id in generation_config.")
        pad = 0
    padded = [answer + [pad] * (longest - len(answer)) for answer in answers]
    return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)
