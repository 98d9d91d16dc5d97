"""Does a request fit the model? Checked before anything runs."""

from collections.abc import Sequence

from mars.checkpoint import MarsConfig
from mars.decoding.options import DecodingOptions
from mars.errors import UserError


def resolve_window(options: DecodingOptions, mars: MarsConfig | None) -> int:
    """Return the masks per group: 0 where none are of use, never more than were trained.

    A plain AR model has no use for masks; its exact mode drafts from n-grams alone.

    Raises:
        UserError: the window is larger than the trained block, or nothing was trained at all.
    """
    if options.is_ar or options.window == 0:
        return 0
    if mars is None:
        if options.mode == "exact" and options.window is None:
            return 0
        raise UserError(
            "This is a plain AR model: it was not trained to predict from masks. Use mode 'exact' "
            "without a window, or train it first with `mars train`."
        )
    window = mars.block_size if options.window is None else options.window
    if window > mars.block_size:
        raise UserError(
            f"window {window} is larger than the block size {mars.block_size} that the model was "
            f"trained with. Use a window of at most {mars.block_size}."
        )
    return window


def check_token_ids(prompt_ids: Sequence[int], options: DecodingOptions, vocabulary: int) -> None:
    """Refuse a prompt without tokens, and ids that the model does not have."""
    if not prompt_ids:
        raise UserError("The prompt is empty: it has no tokens. Give some text.")
    for name, ids in {"The prompt": prompt_ids, "logit_bias": options.logit_bias}.items():
        unknown = next((i for i in ids if not 0 <= i < vocabulary), None)
        if unknown is not None:
            raise UserError(
                f"{name} has token id {unknown}; this model's ids are 0 to {vocabulary - 1}."
            )


def check_context(prompt_tokens: int, max_new_tokens: int, context: int | None) -> None:
    """Refuse a prompt and an answer that may together exceed the context (None: no limit)."""
    if context is None or prompt_tokens + max_new_tokens <= context:
        return
    if prompt_tokens >= context:
        raise UserError(
            f"The prompt has {prompt_tokens} tokens, but the model's context is {context}. "
            "Shorten the prompt."
        )
    raise UserError(
        f"{prompt_tokens} prompt tokens and max_new_tokens {max_new_tokens} exceed the model's "
        f"context of {context}. Use max_new_tokens of at most {context - prompt_tokens}."
    )
