"""Records of `mars distill` as training data: the tokens are taken as they are, and checked."""

import pytest

from mars.data.dataset import build_examples
from mars.data.template import encode_prompt
from mars.decoding.prompts import encode
from mars.errors import UserError

END = 2
PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Why not?"},
    {"role": "user", "content": "Hm."},
]


@pytest.fixture
def record(tiny_tokenizer):
    ids = tiny_tokenizer("Yes.")["input_ids"]
    return {
        "messages": [*PROMPT, {"role": "assistant", "content": "Yes."}],
        "temperature": 0.0,
        "seed": 0,
        "finish_reason": "stop",
        "prompt_ids": encode_prompt(PROMPT, tiny_tokenizer),
        "answer_ids": [*ids, END],
    }


def build(records, tokenizer, **options):
    return build_examples(
        records, tokenizer, **{"max_length": 512, "eos_token_ids": {END}, **options}
    )


def test_prompts_are_encoded_as_the_decoder_does(tiny_tokenizer):
    assert encode_prompt(PROMPT, tiny_tokenizer) == encode(tiny_tokenizer, PROMPT)


def test_only_the_answer_is_learnt(record, tiny_tokenizer):
    (example,), report = build([record], tiny_tokenizer)
    assert example.input_ids == record["prompt_ids"] + record["answer_ids"]
    learnt = [t for t, s in zip(example.input_ids, example.supervised, strict=True) if s]
    assert learnt == record["answer_ids"]
    assert report.format == "distilled"
    assert report.num_supervised_tokens == 5
    (of_text,), _ = build([{"messages": record["messages"]}], tiny_tokenizer, last_turn_only=True)
    assert of_text.supervised[: len(example.supervised)] == example.supervised


def test_an_answer_that_was_cut_teaches_no_end(record, tiny_tokenizer):
    cut = record | {"finish_reason": "length", "answer_ids": record["answer_ids"][:-1]}
    (example,), _ = build([cut], tiny_tokenizer)
    assert example.input_ids[-4:] == cut["answer_ids"]
    assert example.supervised[-4:] == [True] * 4


def test_tokens_are_not_encoded_anew(record, merging_tokenizer):
    """The model wrote two newlines as two tokens; the tokenizer would make one of them."""
    newline = merging_tokenizer.convert_tokens_to_ids("Ċ")
    record["messages"][-1] = {"role": "assistant", "content": "\n\n"}
    record["answer_ids"] = [newline, newline, END]
    record["prompt_ids"] = encode_prompt(PROMPT, merging_tokenizer)
    (example,), _ = build([record], merging_tokenizer)
    assert example.input_ids[-3:] == [newline, newline, END]


def test_long_records_are_treated_like_all_others(record, tiny_tokenizer):
    length = len(record["prompt_ids"]) + 5
    short = record | {"messages": [PROMPT[1], record["messages"][-1]]}
    short["prompt_ids"] = encode_prompt([PROMPT[1]], tiny_tokenizer)
    examples, report = build([record, short], tiny_tokenizer, max_length=length - 1)
    assert ([e.example_id for e in examples], report.num_dropped) == ([1], 1)
    options = {"max_length": length - 1, "on_long": "truncate"}
    examples, report = build([record], tiny_tokenizer, **options)
    assert (report.num_truncated, report.num_supervised_tokens) == (1, 4)


def test_another_tokenizer_is_refused(record, tokenizer_with):
    other = tokenizer_with("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(UserError, match=r"record 1 .*made by another model.*mars distill"):
        build([record | {"prompt_ids": encode_prompt(PROMPT, other)}, record], other)
    with pytest.raises(UserError, match="made by the model 'm'"):
        build([record | {"model": "m"}], other)


def test_an_edited_answer_is_refused(record, tiny_tokenizer):
    record["messages"][-1] = {"role": "assistant", "content": "No."}
    with pytest.raises(UserError, match=r"'No.' is not the text of answer_ids \('Yes.'\)"):
        build([record], tiny_tokenizer)


def test_bytes_that_are_no_text_may_be_shown_differently(record, tiny_tokenizer):
    broken = tiny_tokenizer.convert_tokens_to_ids(["é", "é", "A"])
    record["answer_ids"] = [*broken, END]
    record["messages"][-1] = {"role": "assistant", "content": "\N{REPLACEMENT CHARACTER}A"}
    assert len(build([record], tiny_tokenizer)[0]) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer_ids": []}, "'answer_ids' must be a list of token ids"),
        ({"answer_ids": "[1, 2]"}, "'answer_ids' must be a list of token ids"),
        ({"prompt_ids": [1.5]}, "'prompt_ids' must be a list of token ids"),
        ({"prompt_ids": None}, "'prompt_ids' of the distilled format is null"),
        ({"messages": PROMPT}, "last message must be the answer"),
        ({"system": "x"}, "'system' is not supported in the distilled format"),
    ],
)
def test_bad_records(record, tiny_tokenizer, change, words):
    with pytest.raises(UserError, match=f"record 0 .*{words}"):
        build([record | change], tiny_tokenizer)
