"""The Python interface: `generate` for results, `stream` for text as it comes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, overload

from mars.checkpoint import Checkpoint
from mars.decoding.limits import check_context, check_token_ids, resolve_window
from mars.decoding.loop import decode
from mars.decoding.options import DecodingOptions
from mars.decoding.prompts import as_list, encode, text_decoder
from mars.decoding.request import Prompt, Request, Result
from mars.decoding.row import Event
from mars.errors import UserError


@overload
def generate(
    checkpoint: Checkpoint,
    prompts: str | Sequence[Mapping[str, str]] | Sequence[int],
    options: DecodingOptions | None = None,
    *,
    raw: bool = False,
    batch_size: int = 8,
    **overrides: Any,
) -> Result: ...
@overload
def generate(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    options: DecodingOptions | None = None,
    *,
    raw: bool = False,
    batch_size: int = 8,
    **overrides: Any,
) -> list[Result]: ...
def generate(
    checkpoint: Checkpoint,
    prompts: Prompt | Sequence[Prompt],
    options: DecodingOptions | None = None,
    *,
    raw: bool = False,
    batch_size: int = 8,
    **overrides: Any,
) -> Result | list[Result]:
    """Generate answers.

    Args:
        checkpoint: from `mars.load`.
        prompts: one prompt or a list of them. A prompt is text (put into the chat template unless
            `raw`), a list of chat messages, or a list of token ids.
        options: how to decode; the defaults of `DecodingOptions` if None.
        raw: continue text as it stands, without the chat template.
        batch_size: rows that run together; changes speed and memory, not the answers.
        **overrides: fields of `DecodingOptions` to change, such as `temperature=0.7`. A `threshold`
            or `confidence` without a `mode` means the threshold mode.

    Returns:
        A `Result` for one prompt, a list of them in the same order for a list.

    Raises:
        UserError: an option or a prompt is not valid, or does not fit the model.
    """
    prompt_list, is_single = as_list(prompts)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"batch_size must be an integer of at least 1; got {batch_size!r}.")
    options = with_overrides(options, overrides)
    requests = [prepare(checkpoint, prompt, options, raw=raw) for prompt in prompt_list]
    events = run(checkpoint, requests, batch_size=batch_size)
    results = {event.index: event.result for event in events if event.result is not None}
    ordered = [results[index] for index in range(len(requests))]
    return ordered[0] if is_single else ordered


def stream(
    checkpoint: Checkpoint,
    prompt: Prompt,
    options: DecodingOptions | None = None,
    *,
    raw: bool = False,
    **overrides: Any,
) -> "TextStream":
    """Generate one answer and iterate over its text while it is written.

    Arguments and errors as for `generate`, with one prompt.

    Returns:
        An iterator of non-empty pieces that join to the text of its `result`.
    """
    request = prepare(checkpoint, prompt, with_overrides(options, overrides), raw=raw)
    return TextStream(checkpoint, request)


class TextStream:
    """Iterate once over the pieces of an answer.

    Attributes:
        result: None until the last piece has been taken.
    """

    def __init__(self, checkpoint: Checkpoint, request: Request) -> None:
        self.result: Result | None = None
        self._events = run(checkpoint, [request])

    def __iter__(self) -> Iterator[str]:
        for event in self._events:
            self.result = event.result
            if event.text:
                yield event.text


def prepare(
    checkpoint: Checkpoint, prompt: Prompt, options: DecodingOptions, *, raw: bool = False
) -> Request:
    """Check a prompt and its options against the checkpoint and make a request of them.

    Raises:
        UserError: the window is larger than trained, the model was not trained for drafts, the
            prompt is empty or holds unknown ids, or prompt and answer exceed the context.
    """
    prompt_ids = encode(checkpoint.tokenizer, prompt, raw=raw)
    check_token_ids(prompt_ids, options, checkpoint.model.config.vocab_size)
    check_context(len(prompt_ids), options.max_new_tokens, checkpoint.context_length)
    end_ids = frozenset() if options.ignore_eos else checkpoint.eos_token_ids
    return Request(
        prompt=prompt,
        prompt_ids=prompt_ids,
        options=options,
        window=resolve_window(options, checkpoint.mars),
        end_ids=end_ids | frozenset(options.stop_token_ids),
        decode=text_decoder(checkpoint.tokenizer),
    )


def run(
    checkpoint: Checkpoint, requests: Sequence[Request], *, batch_size: int = 8
) -> Iterator[Event]:
    """Decode requests that `prepare` has made; see `mars.decoding.loop.decode`."""
    mask = None if checkpoint.mars is None else checkpoint.mars.mask_token_id
    return decode(checkpoint.model, requests, mask_token_id=mask, batch_size=batch_size)


def with_overrides(options: DecodingOptions | None, overrides: dict[str, Any]) -> DecodingOptions:
    """Change fields of options, or of the default ones; arguments and errors as for `generate`."""
    names = {field.name for field in fields(DecodingOptions)}
    if unknown := sorted(set(overrides) - names):
        raise UserError(
            f"Unknown option {', '.join(unknown)}. Options: {', '.join(sorted(names))}."
        )
    if {"threshold", "confidence"} & set(overrides) and "mode" not in overrides:
        overrides.setdefault("mode", "threshold")
    return replace(options or DecodingOptions(), **overrides)
