from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mars.decoding.prompts import as_list, encode, text_decoder
from mars.errors import UserError


@pytest.mark.parametrize(
    ("prompts", "count", "is_single"),
    [
        ("text", 1, True),
        ([1, 2], 1, True),
        ([{"role": "user", "content": "x"}], 1, True),
        (["a", "b"], 2, False),
        ([[1], [2], [3]], 3, False),
        ([[{"role": "user", "content": "x"}]], 1, False),
    ],
)
def test_one_prompt_or_many(prompts: Any, count: int, is_single: bool) -> None:
    listed, single = as_list(prompts)
    assert (len(listed), single) == (count, is_single)


def test_text_goes_into_the_chat_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(tiny_tokenizer, "hi")
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(ids) == expected
    assert encode(tiny_tokenizer, [{"role": "user", "content": "hi"}]) == ids
    assert tiny_tokenizer.decode(encode(tiny_tokenizer, "hi", raw=True)) == "hi"
    assert encode(tiny_tokenizer, [5, 6]) == [5, 6]


@pytest.mark.parametrize(
    "prompt", ["", [], 5, [1, "a"], [1.5], [{"role": "user"}], [{"content": "x"}], [True], None]
)
def test_no_prompt(tiny_tokenizer: PreTrainedTokenizerFast, prompt: Any) -> None:
    with pytest.raises(UserError):
        encode(tiny_tokenizer, prompt)


@pytest.mark.parametrize("prompts", [[], None, 3])
def test_no_prompts(prompts: Any) -> None:
    with pytest.raises(UserError, match="prompt"):
        as_list(prompts)


def test_messages_are_not_raw(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="raw"):
        encode(tiny_tokenizer, [{"role": "user", "content": "hi"}], raw=True)


def test_no_template(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="raw=True"):
        encode(tiny_tokenizer, "hi")


def test_decoder_leaves_special_tokens_out(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(tiny_tokenizer, "a , b", raw=True)
    assert text_decoder(tiny_tokenizer)([*ids, 2]) == "a , b"
    want = tiny_tokenizer.decode(
        [*ids, 2], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert text_decoder(tiny_tokenizer)([*ids, 2]) == want


def test_decoder_of_a_tokenizer_with_its_own(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **settings: Any) -> str:
            return super()._decode(*args, **settings).upper()

    loud = Loud(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    ids = encode(tiny_tokenizer, "a , b", raw=True)
    assert text_decoder(loud)(ids) == "A , B"
