"""Show tokenised examples with their loss masks: the quickest check of a dataset."""

from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from mars.data.dataset import Example

# (before, after) the supervised text and the rest.
PLAIN = (("⟦", "⟧"), ("", ""))
COLOURED = (("\x1b[1;32m", "\x1b[0m"), ("\x1b[2m", "\x1b[0m"))


def preview(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, *, limit: int, color: bool
) -> str:
    """Return the first `limit` examples as text, supervised parts green or between ⟦ and ⟧.

    Each has a heading with its share of supervised tokens; the last line is about all examples.
    """
    parts = [
        f"--- example {example.example_id}: {_share([example])}\n{_text(example, tokenizer, color)}"
        for example in examples[:limit]
    ]
    return "\n".join([*parts, f"--- all {len(examples)} examples: {_share(examples)}"])


def _text(example: Example, tokenizer: PreTrainedTokenizerBase, color: bool) -> str:
    supervised_style, other_style = COLOURED if color else PLAIN
    pairs = zip(example.input_ids, example.supervised, strict=True)
    text = ""
    for is_supervised, group in groupby(pairs, key=lambda pair: pair[1]):
        before, after = supervised_style if is_supervised else other_style
        text += f"{before}{tokenizer.decode([token for token, _ in group])}{after}"
    return text


def _share(examples: Sequence[Example]) -> str:
    num_tokens = sum(len(example.input_ids) for example in examples)
    num_supervised = sum(sum(example.supervised) for example in examples)
    share = 100 * num_supervised / max(1, num_tokens)
    return f"{num_tokens:,} tokens, {num_supervised:,} supervised ({share:.1f} %)"
