"""Tokenizers with other chat templates, and helpers to write loss masks by hand."""

import copy
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ONE_LETTER = {"<|endoftext|>": "P", "<|im_start|>": "S", "<|im_end|>": "E", "Ċ": "N", "Ġ": "_"}


@pytest.fixture
def tokenizer_with(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Callable[[str | None], PreTrainedTokenizerFast]:
    """Return a factory of tiny tokenizers with the given chat template."""

    def make(template: str | None) -> PreTrainedTokenizerFast:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def letters(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[[list[int]], str]:
    """Write tokens as one letter each: S(tart), E(nd), N(ewline), P(ad), _ (space), else itself."""

    def write(ids: list[int]) -> str:
        tokens = tiny_tokenizer.convert_ids_to_tokens(ids)
        return "".join(ONE_LETTER.get(token, token) for token in tokens)

    return write


@pytest.fixture
def merging_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with one merge: two newlines are one token."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    vocabulary = {
        t: i for i, t in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    vocabulary["ĊĊ"] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = tiny_tokenizer.chat_template
    return tokenizer
