"""`mars chat`: a conversation in the terminal, or line by line from a pipe."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from mars.cli.generate import describe
from mars.cli.options import (
    DEFAULTS,
    Adapter,
    Confidence,
    DraftThreshold,
    Dtype,
    Layout,
    MaxGroups,
    MaxNewTokens,
    Mode,
    Model,
    Ngram,
    RepetitionPenalty,
    Seed,
    Temperature,
    Threshold,
    TopP,
    Window,
    decoding_options,
    load_checkpoint,
)
from mars.errors import UserError

if TYPE_CHECKING:
    from mars.checkpoint import Checkpoint
    from mars.decoding.options import DecodingOptions

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends it."


def chat(
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
    repetition_penalty: RepetitionPenalty = DEFAULTS.repetition_penalty,
    seed: Seed = DEFAULTS.seed,
    dtype: Dtype = "auto",
) -> None:
    """Chat with a model.

    After each answer see tokens per forward (TPF) and tokens per second.
    """
    from mars.decoding.limits import resolve_window

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
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    resolve_window(options, checkpoint.mars)  # refuse now, not after the first question
    interactive = sys.stdin.isatty()
    if interactive:
        print(HELP)
    converse(checkpoint, options, read_turns(interactive), is_fatal=not interactive)


def converse(
    checkpoint: "Checkpoint", options: "DecodingOptions", turns: Iterator[str], *, is_fatal: bool
) -> None:
    """Answer the turns of a user, each in the light of those before it.

    Args:
        checkpoint: the model.
        options: how to decode.
        turns: what the user says; a line that starts with `/` is a command.
        is_fatal: raise errors (such as a full context) instead of showing them and going on.
    """
    messages: list[dict[str, str]] = []
    for turn in turns:
        if turn == "/quit":
            return
        if turn == "/reset":
            messages.clear()
        elif turn.startswith("/"):
            print(f"Unknown command {turn}. {HELP}", file=sys.stderr)
        elif turn:
            messages.append({"role": "user", "content": turn})
            try:
                answer = say(checkpoint, messages, options)
            except UserError as error:
                if is_fatal:
                    raise
                messages.pop()
                print(f"error: {error} {HELP}", file=sys.stderr)
            else:
                messages.append({"role": "assistant", "content": answer})


def say(
    checkpoint: "Checkpoint", messages: list[dict[str, str]], options: "DecodingOptions"
) -> str:
    """Print the next answer while it is written, then its figures on stderr; return it."""
    from mars.decoding.generate import stream

    answer = stream(checkpoint, messages, options)
    for piece in answer:
        print(piece, end="", flush=True)
    print(flush=True)
    assert answer.result is not None
    print(describe(answer.result), file=sys.stderr)
    return answer.result.text


def read_turns(interactive: bool) -> Iterator[str]:
    """Yield what the user types, or the lines of a pipe, without surrounding blanks."""
    if not interactive:
        try:
            for line in sys.stdin:
                yield line.strip()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text: {error}") from error
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and a history
    with suppress(EOFError):
        while True:
            yield input("> ").strip()
