"""From what a caller calls a prompt to token ids."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mars.compat import backend_decode
from mars.decoding.request import Prompt
from mars.decoding.stop import Decode
from mars.errors import UserError


def as_list(prompts: Any) -> tuple[list[Prompt], bool]:
    """Return a list of prompts, and whether it was a single one: text, messages or token ids.

    Raises:
        UserError: there is no prompt.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, Sequence) or len(prompts) == 0:
        raise UserError(f"Give a prompt or a list of prompts; got {prompts!r}.")
    if isinstance(prompts[0], Mapping | int):
        return [prompts], True
    return list(prompts), False


def text_decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the function that turns tokens of an answer into text, special tokens left out."""

    if (backend := backend_decode(tokenizer)) is not None:
        return partial(backend, skip_special_tokens=True)

    def decode(token_ids: list[int]) -> str:
        # "Cleaning up" spaces would change text that has already been shown.
        text: Any = tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, raw: bool = False) -> list[int]:
    """Turn a prompt into token ids.

    Args:
        tokenizer: the checkpoint's.
        prompt: text, chat messages, or token ids, which are taken as they are.
        raw: do not put text into the chat template.

    Raises:
        UserError: the prompt is empty or of another type, or there is no chat template.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise UserError("The prompt is empty. Give some text.")
        if raw:
            return _tokenise(tokenizer, prompt)
        return _encode_messages(tokenizer, [{"role": "user", "content": prompt}])
    if not isinstance(prompt, Sequence) or not prompt:
        raise UserError(f"A prompt is text, chat messages or token ids, not empty; got {prompt!r}.")
    if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return list(prompt)  # type: ignore[arg-type]
    if all(isinstance(message, Mapping) for message in prompt):
        if raw:
            raise UserError("raw=True is for text or token ids; chat messages need the template.")
        return _encode_messages(tokenizer, prompt)
    raise UserError(f"A prompt is text, chat messages or token ids; got {prompt!r}.")


def _encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any]) -> list[int]:
    if not tokenizer.chat_template:
        raise UserError(
            "This tokenizer has no chat template. Use raw=True (--raw) to continue plain text."
        )
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UserError(f"A message needs a 'role' and a 'content' text; got {message!r}.")
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
    )
    # The template has already written the special tokens, the first one included.
    return _tokenise(tokenizer, str(text), add_special_tokens=False)


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str, **settings: Any) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The prompt is not valid Unicode: {error}. Check its encoding.") from error
    return list(tokenizer(text, **settings)["input_ids"])
