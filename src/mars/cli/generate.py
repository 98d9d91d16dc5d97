"""`mars generate`: answers to one prompt or many, as text or as JSON lines."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mars.cli.options import (
    DEFAULTS,
    Adapter,
    BatchSize,
    Confidence,
    DraftThreshold,
    Dtype,
    Layout,
    Logprobs,
    MaxGroups,
    MaxNewTokens,
    MinP,
    Mode,
    Model,
    Ngram,
    PromptsFile,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    Threshold,
    TopK,
    TopP,
    Window,
    decoding_options,
    load_checkpoint,
)
from mars.errors import UserError

if TYPE_CHECKING:
    from mars.checkpoint import Checkpoint
    from mars.decoding.options import DecodingOptions
    from mars.decoding.request import Prompt, Request, Result
    from mars.decoding.row import Event

JSON_KEYS = (
    "prompt",
    "text",
    "token_ids",
    "finish_reason",
    "mode",
    "forwards",
    "tokens_per_forward",
    "seconds",
)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="A question; left out: --prompts or standard input.")
    ] = None,
    prompts_file: PromptsFile = None,
    model: Model = None,
    adapter: Adapter = "auto",
    mode: Mode = None,
    window: Window = None,
    layout: Layout = DEFAULTS.layout,
    max_groups: MaxGroups = DEFAULTS.max_groups,
    ngram: Ngram = DEFAULTS.ngram,
    draft_threshold: DraftThreshold = DEFAULTS.draft_threshold,
    threshold: Threshold = None,
    confidence: Confidence = None,
    max_new_tokens: MaxNewTokens = DEFAULTS.max_new_tokens,
    temperature: Temperature = DEFAULTS.temperature,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    min_p: MinP = DEFAULTS.min_p,
    repetition_penalty: RepetitionPenalty = DEFAULTS.repetition_penalty,
    seed: Seed = DEFAULTS.seed,
    stop: Stop = None,
    logprobs: Logprobs = None,
    dtype: Dtype = "auto",
    batch_size: BatchSize = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, in the order of input.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")
    ] = False,
) -> None:
    """Answer one prompt or many.

    They are the PROMPT, the lines of a file (--prompts), or the lines of standard input.
    """
    if logprobs is not None and not as_json:
        raise UserError("--logprobs needs --json: text output has no place for them.")
    prompts = gather_prompts(prompt, prompts_file)
    checkpoint = load_checkpoint(model, dtype, adapter)
    options = decoding_options(
        checkpoint,
        mode=mode,
        threshold=threshold,
        confidence=confidence,
        window=window,
        layout=layout,
        max_groups=max_groups,
        ngram=ngram,
        draft_threshold=draft_threshold,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        logprobs=logprobs,
    )
    requests = prepare_all(checkpoint, prompts, options, raw=raw)
    from mars.decoding.generate import run

    events = run(checkpoint, requests, batch_size=batch_size)
    if as_json:
        for result in in_order(events):
            print(as_json_line(result), flush=True)
    elif len(requests) == 1:
        show_answer(events)
    else:
        for number, result in enumerate(in_order(events), start=1):
            print(f"--- {number}: {heading(result.prompt)}\n{result.text}", flush=True)
            print(describe(result), file=sys.stderr)


def gather_prompts(prompt: str | None, prompts_file: Path | None) -> "Sequence[Prompt]":
    """Return the prompts from the one place that was named.

    Raises:
        UserError: two places or none, or no prompt there.
    """
    from mars.data.files import read_prompts

    if prompt is not None and prompts_file is not None:
        raise UserError("Give either a PROMPT or --prompts FILE, not both.")
    if prompt is not None:
        return [prompt]
    if prompts_file is not None:
        return read_prompts(prompts_file)
    if sys.stdin.isatty():
        raise UserError("There is no prompt. Give a PROMPT, --prompts FILE, or pipe prompts in.")
    try:
        return read_prompts(sys.stdin)
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: {error}") from error


def prepare_all(
    checkpoint: "Checkpoint", prompts: "Sequence[Prompt]", options: "DecodingOptions", *, raw: bool
) -> "list[Request]":
    """Check every prompt before the first answer; an error says which prompt it is about."""
    from mars.decoding.generate import prepare

    requests = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            requests.append(prepare(checkpoint, prompt, options, raw=raw))
        except UserError as error:
            where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise UserError(f"{where}{error}") from error
    return requests


def in_order(events: "Iterable[Event]") -> "Iterator[Result]":
    """Yield every result as soon as it and all before it are there."""
    waiting: dict[int, Result] = {}
    following = 0
    for event in events:
        if event.result is not None:
            waiting[event.index] = event.result
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def show_answer(events: "Iterable[Event]") -> None:
    """Print one answer while it is written, then its figures on stderr."""
    for event in events:
        print(event.text, end="", flush=True)
        if event.result is not None:
            print(flush=True)
            print(describe(event.result), file=sys.stderr)


def describe(result: "Result") -> str:
    """Summarise a result in one line."""
    count = len(result.token_ids)
    rate = count / result.seconds if result.seconds > 0 else 0.0
    return (
        f"[{result.mode}: {count} tokens in {result.forwards} forwards, "
        f"TPF {result.tokens_per_forward:.2f}, {rate:.1f} tokens/s, {result.finish_reason}]"
    )


def as_json_line(result: "Result") -> str:
    """Return the fields of a result that the JSON output promises, as one line.

    `logprobs`, if asked for: per token `token_id`, `logprob`, and `top`, which maps ids to theirs.
    """
    record: dict[str, Any] = {key: getattr(result, key) for key in JSON_KEYS}
    if result.logprobs is not None:
        record["logprobs"] = [asdict(logprob) for logprob in result.logprobs]
    return json.dumps(record, ensure_ascii=False)


def heading(prompt: "Prompt", width: int = 60) -> str:
    """Shorten a prompt (the last message of a conversation) to one line."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])  # type: ignore[index]
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."
