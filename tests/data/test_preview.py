"""The preview shows exactly the loss mask."""

from mars.data.dataset import build_examples
from mars.data.preview import preview

RECORDS = [{"question": "a", "answer": "bc"}, {"question": "d", "answer": "e"}]
PLAIN = """\
--- example 0: 24 tokens, 3 supervised (12.5 %)
<|im_start|>user
a<|im_end|>
<|im_start|>assistant
⟦bc<|im_end|>⟧

--- all 2 examples: 47 tokens, 5 supervised (10.6 %)"""


def examples(tokenizer):
    return build_examples(RECORDS, tokenizer, max_length=64, eos_token_ids={2})[0]


def test_plain_preview(tiny_tokenizer):
    assert preview(examples(tiny_tokenizer), tiny_tokenizer, limit=1, color=False) == PLAIN


def test_coloured_preview(tiny_tokenizer):
    text = preview(examples(tiny_tokenizer), tiny_tokenizer, limit=5, color=True)
    assert "\x1b[1;32mbc<|im_end|>\x1b[0m" in text
    assert "\x1b[1;32me<|im_end|>\x1b[0m" in text
    assert text.count("\x1b[1;32m") == 2
    assert "⟦" not in text
