"""Tokenise conversations and texts, and find the tokens a model should learn to write.

Supervised are the tokens of the assistant's turns: what the model writes when generation starts
after the template's generation prompt, up to and including the end-of-sequence (EOS) token where
generation stops. What a template adds after that token (usually a newline) is never generated, so
it is not supervised.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mars.data.formats import Chat, Message, Text, Trajectory
from mars.errors import UserError

Span = tuple[int, int]
"""Token indices [start, stop)."""
Encoded = tuple[list[int], list[bool]]
"""Token ids and, for each, whether it is supervised."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def encode_text(
    text: Text, tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Collection[int]
) -> Encoded:
    """Tokenise prompt and completion as one text and supervise the completion and an EOS token.

    The first token is never supervised: nothing precedes it that could predict it.

    Raises:
        UserError: no EOS token is known, or the tokenizer gives no character offsets.
    """
    ids, offsets = _tokenise(tokenizer, text.prompt + text.completion, add_special_tokens=True)
    supervised = [end > len(text.prompt) for _, end in offsets]
    if not ids or ids[-1] not in eos_token_ids:
        ids.append(_eos_token_id(tokenizer, eos_token_ids))
        supervised.append(True)
    return ids, [False, *supervised[1:]]


def encode_chat(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    eos_token_ids: Collection[int],
    last_turn_only: bool = False,
) -> Encoded:
    """Apply the chat template and supervise every assistant turn after the given context.

    1. A template with `{% generation %}` markers says itself which tokens are the assistant's.
    2. Otherwise a turn is what the conversation has more than its generation prompt.
    3. A template that rewrites turns (Qwen3 strips the reasoning of earlier ones) has no such
       prefix: a marked version of it is taken from `trl`, if that knows one.

    Args:
        chat: the conversation.
        tokenizer: a fast tokenizer with a chat template.
        eos_token_ids: the tokens where generation stops.
        last_turn_only: supervise only the last assistant turn.

    Raises:
        UserError: no chat template, one that refuses the conversation, that does not end turns
            with an EOS token, or that rewrites turns and has no known marked version.
    """
    template = _chat_template(tokenizer)
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    turns = [i for i in turns if i >= chat.context][-1 if last_turn_only else 0 :]
    _check_contents(chat.messages, turns, tokenizer, eos_token_ids)
    found = None
    if not has_generation_markers(template):
        found = _turns_by_prefix(chat.messages, turns, tokenizer, eos_token_ids)
        template = template if found else _training_template(tokenizer)
    ids, spans = found or _turns_by_markers(
        chat.messages, turns, tokenizer, template, eos_token_ids
    )
    supervised = [False] * len(ids)
    for start, stop in spans:
        supervised[start:stop] = [True] * (stop - start)
    return ids, supervised


def encode_trajectory(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Take the tokens of a recorded answer as they are; the answer is supervised.

    Raises:
        UserError: the tokenizer makes other tokens of the prompt, so they are another model's, or
            the answer's text is not that of its tokens.
    """
    ids = encode_prompt(trajectory.messages, tokenizer)
    if ids != trajectory.prompt_ids:
        maker = "another model" if trajectory.model is None else f"the model {trajectory.model!r}"
        raise UserError(
            "prompt_ids are not what the tokenizer of this model makes of the messages: the "
            f"record was made by {maker} or with another chat template. Let this model answer "
            "the prompts (`mars distill` reads this file as prompts), or learn the text instead "
            "of the tokens: --columns messages=messages"
        )
    text: Any = tokenizer.decode(
        trajectory.answer_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # Streamed text may have another number of these where bytes are no text.
    if text.replace(_REPLACEMENT, "") != trajectory.text.replace(_REPLACEMENT, ""):
        raise UserError(
            f"the answer {trajectory.text[:60]!r} is not the text of answer_ids "
            f"({text[:60]!r}): was it edited? Remove the record, or learn the text of all "
            "records instead of the tokens: --columns messages=messages"
        )
    supervised = [False] * len(ids) + [True] * len(trajectory.answer_ids)
    return ids + trajectory.answer_ids, supervised


def encode_prompt(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a conversation and the template's generation prompt.

    Raises:
        UserError: there is no chat template, or it refuses the conversation.
    """
    _chat_template(tokenizer)
    text = _render(tokenizer, messages, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def has_generation_markers(template: str) -> bool:
    """Say whether a chat template marks the assistant's text with `{% generation %}`."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


def _turns_by_markers(
    messages: list[Message],
    turns: list[int],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    eos_token_ids: Collection[int],
) -> tuple[list[int], list[Span]]:
    """Return the token ids and the spans which the template marks for the last `turns`."""
    _require_offsets(tokenizer)
    encoded: Any = _apply_template(
        tokenizer,
        messages,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids = list(encoded["input_ids"])
    spans = _runs(encoded["assistant_masks"])
    num_assistant_turns = sum(message["role"] == "assistant" for message in messages)
    if len(turns) < num_assistant_turns:
        if len(spans) != num_assistant_turns:
            raise UserError(
                f"the chat template marks {len(spans)} spans for {num_assistant_turns} assistant "
                "turns, so the turns to learn cannot be told apart; learn from all turns instead"
            )
        spans = spans[-len(turns) :]
    text = _render(tokenizer, messages, chat_template=template)
    for turn in turns:
        if not _contains(text, messages[turn]["content"]):
            raise UserError(f"the chat template leaves out a part of message {turn}")
    spans = [_until_eos(ids, span, eos_token_ids) for span in spans]
    if spans and ids[spans[-1][1] - 1] not in eos_token_ids:
        turn = str(tokenizer.decode(ids[slice(*spans[-1])]))
        raise _no_eos_error(tokenizer, turn, eos_token_ids)
    return ids, spans


def _contains(text: str, content: str) -> bool:
    """Say whether the content is in the text; templates may trim or add white space."""
    return "".join(content.split()) in "".join(text.split())


def _runs(mask: Sequence[int]) -> list[Span]:
    """Return the spans of consecutive ones."""
    padded = [0, *mask, 0]
    starts = [i for i in range(len(mask)) if padded[i + 1] and not padded[i]]
    stops = [i for i in range(1, len(mask) + 1) if padded[i] and not padded[i + 1]]
    return list(zip(starts, stops, strict=True))


def _until_eos(ids: list[int], span: Span, eos_token_ids: Collection[int]) -> Span:
    """Let a marked span end with its first EOS token, which may stand just behind the marker."""
    start, stop = span
    for i in range(start, min(stop + 1, len(ids))):
        if ids[i] in eos_token_ids:
            return start, i + 1
    return span


def _turns_by_prefix(
    messages: list[Message],
    turns: list[int],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
) -> tuple[list[int], list[Span]] | None:
    """Return the token ids and the spans of the turns; None if the template rewrites a turn.

    A turn starts where its generation prompt ends and stops with the first EOS token. A token
    that straddles the start carries the assistant's text and belongs to the turn.
    """
    text = _render(tokenizer, messages)
    ids, offsets = _tokenise(tokenizer, text, add_special_tokens=False)
    spans = []
    for turn in turns:
        prompt = _render(tokenizer, messages[:turn], add_generation_prompt=True)
        # What the template writes while this turn is the last one, as it is when generated.
        generated = _render(tokenizer, messages[: turn + 1])
        if not (text.startswith(prompt) and generated.startswith(prompt)):
            return None
        start = sum(end <= len(prompt) for _, end in offsets)
        stop = next((i + 1 for i in range(start, len(ids)) if ids[i] in eos_token_ids), None)
        end = offsets[stop - 1][1] if stop else len(text)
        if stop is None or (end > len(generated) and text.startswith(generated)):
            raise _no_eos_error(tokenizer, generated[len(prompt) :], eos_token_ids)
        is_complete = _contains(text[len(prompt) : end], messages[turn]["content"])
        if text[:end] != generated[:end] or not is_complete:
            return None
        spans.append((start, stop))
    return ids, spans


def _training_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the marked version of a template that rewrites earlier turns, from `trl`."""
    advice = (
        "the chat template rewrites assistant turns (earlier ones, or their reasoning), so what "
        "the model should learn in them cannot be found. Learn from the last turn only "
        "(last_turn_only=True), or set tokenizer.chat_template to a version with "
        "{% generation %} markers"
    )
    try:
        # Not a dependency: only templates that rewrite history need it.
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        raise UserError(f"{advice}, or install trl, which knows the usual ones.") from error
    try:
        template = get_training_chat_template(tokenizer)
    except (ValueError, TemplateError) as error:
        raise UserError(f"{advice} (trl knows no version of this one).") from error
    if template is None:
        raise UserError(f"{advice}.")
    return template


def _check_contents(
    messages: list[Message],
    turns: list[int],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
) -> None:
    """Refuse answers which contain the text of an EOS token: they would stop in the middle."""
    names = _names(tokenizer, eos_token_ids)
    for turn in turns:
        for name in names:
            if name in messages[turn]["content"]:
                raise UserError(
                    f"message {turn} contains '{name}', which the tokenizer reads as the end of "
                    "the turn; remove it from the text"
                )


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template, which chat data needs. Use the instruction-tuned "
            "version of the model, set tokenizer.chat_template, or give the data as text or as "
            "prompt/completion strings."
        )
    return tokenizer.get_chat_template()


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **options: Any) -> str:
    return str(_apply_template(tokenizer, messages, tokenize=False, **options))


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], **options: Any
) -> object:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the chat template refuses roles {roles}: {error}") from error


def _tokenise(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool
) -> tuple[list[int], list[Span]]:
    """Return the token ids and the characters [start, end) of each; added tokens have none."""
    _require_offsets(tokenizer)
    encoded = tokenizer(
        text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
    )
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def _require_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is a slow tokenizer: it does not say which characters a "
            "token covers, so the loss mask cannot be built. Convert it to a fast one "
            "(tokenizer.json)."
        )


def _eos_token_id(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> int:
    if tokenizer.eos_token_id in eos_token_ids:
        return tokenizer.eos_token_id
    if not eos_token_ids:
        raise UserError("the model has no end-of-sequence token; set tokenizer.eos_token")
    return min(eos_token_ids)


def _no_eos_error(
    tokenizer: PreTrainedTokenizerBase, turn: str, eos_token_ids: Collection[int]
) -> UserError:
    known = ", ".join(_names(tokenizer, eos_token_ids)) or "none"
    return UserError(
        f"the chat template does not end the assistant's turn {turn[-60:]!r} "
        f"with an end-of-sequence token of the model ({known}): a model trained so would never "
        "stop. Add the template's end-of-turn token to eos_token_id in generation_config.json."
    )


def _names(tokenizer: PreTrainedTokenizerBase, token_ids: Collection[int]) -> list[str]:
    return [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in sorted(token_ids)]
