"""From a source to examples: nothing is lost without being counted."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.data.dataset import Example, build_examples, read_records
from mars.errors import UserError

END = 2
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_test.jsonl"


def texts(*contents: str) -> list[dict[str, str]]:
    return [{"text": content} for content in contents]


def build(records, tokenizer, **options):
    return build_examples(
        records, tokenizer, **{"max_length": 64, "eos_token_ids": {END}, **options}
    )


def test_examples_keep_their_position_in_the_file(tiny_tokenizer):
    examples, report = build(texts("abc", "x" * 99, "", "de"), tiny_tokenizer)
    assert [example.example_id for example in examples] == [0, 3]
    assert examples[1] == Example(
        input_ids=[*tiny_tokenizer("de")["input_ids"], END],
        supervised=[False, True, True],
        example_id=3,
    )
    counts = (report.num_records, report.num_examples, report.num_dropped, report.num_unsupervised)
    assert counts == (4, 2, 1, 1)
    assert (report.num_tokens, report.num_supervised_tokens) == (7, 5)


def test_report_names_ignored_columns(tiny_tokenizer):
    records = [{"text": "abc", "id": 1}, {"text": "abc", "url": "x"}]
    _, report = build(records, tiny_tokenizer)
    assert report.ignored_columns == ("id", "url")
    text = report.describe()
    assert "2 records in text format: 2 examples of 8 tokens, 75.0 % supervised" in text
    assert "ignored columns: id, url" in text


def test_truncation_leaves_no_end_of_turn_that_is_not_there(tiny_tokenizer):
    examples, report = build(texts("abcdef"), tiny_tokenizer, max_length=4, on_long="truncate")
    assert examples[0].input_ids == tiny_tokenizer("abcd")["input_ids"]
    assert examples[0].supervised == [False, True, True, True]
    assert (report.num_truncated, report.num_dropped) == (1, 0)


def test_truncation_that_cuts_the_answer_away(tiny_tokenizer):
    records = [{"question": "long " * 9, "answer": "a"}, {"question": "b", "answer": "c"}]
    examples, report = build(records, tiny_tokenizer, max_length=40, on_long="truncate")
    assert [example.example_id for example in examples] == [1]
    assert (report.num_truncated, report.num_unsupervised) == (1, 1)
    with pytest.raises(UserError, match=r"all-zero loss mask.*1 were cut there"):
        build(records[:1], tiny_tokenizer, max_length=40, on_long="truncate")


def test_long_records_can_be_an_error(tiny_tokenizer):
    with pytest.raises(UserError, match=r"first is record 1 .* with 7 tokens; raise max_length"):
        build(texts("abc", "abcdef"), tiny_tokenizer, max_length=6, on_long="error")
    assert len(build(texts("abc", "abcde"), tiny_tokenizer, max_length=6, on_long="error")[0]) == 2


def test_all_too_long(tiny_tokenizer):
    with pytest.raises(UserError, match=r"all 2 records are longer .* shortest has 9 tokens"):
        build(texts("x" * 8, "x" * 20), tiny_tokenizer, max_length=5)


def test_all_zero_loss_mask(tokenizer_with):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# {% generation %} #}"
    with pytest.raises(UserError, match="all-zero loss mask"):
        build([{"question": "a", "answer": "b"}], tokenizer_with(template))


def test_last_turn_only(tiny_tokenizer):
    messages = [
        {"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")
    ]
    (every,), _ = build([{"messages": messages}], tiny_tokenizer)
    (last,), _ = build([{"messages": messages}], tiny_tokenizer, last_turn_only=True)
    assert (sum(every.supervised), sum(last.supervised)) == (4, 2)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no records"),
        ([{"body": "x"}], "not recognised"),
        ([{"text": "abc"}, {"text": None}], "record 1 .*'text' of the text format is null"),
        ([{"text": "abc"}, {"body": "x"}], "record 1 .*is missing"),
        ([{"question": "a", "answer": "b"}, {"text": "x"}], "record 1 .*is missing"),
    ],
)
def test_bad_records_are_named(tiny_tokenizer, records, message):
    with pytest.raises(UserError, match=message):
        build(records, tiny_tokenizer)


@pytest.mark.parametrize("options", [{"max_length": 1}, {"on_long": "wrap"}])
def test_bad_options(tiny_tokenizer, options):
    with pytest.raises(UserError, match="max_length must be at least 2 and on_long one of"):
        build(texts("abc"), tiny_tokenizer, **options)


def test_an_example_must_be_consistent():
    with pytest.raises(ValueError, match="mask values"):
        Example(input_ids=[1], supervised=[], example_id=0)
    with pytest.raises(ValueError, match="first token"):
        Example(input_ids=[1], supervised=[True], example_id=0)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    max_length=st.integers(2, 10),
    on_long=st.sampled_from(["drop", "truncate"]),
)
@settings(max_examples=60, deadline=None)
def test_every_record_is_accounted_for(tiny_tokenizer, lengths, max_length, on_long):
    records = texts(*("x" * length for length in lengths))
    try:
        examples, report = build(records, tiny_tokenizer, max_length=max_length, on_long=on_long)
    except UserError:
        kept = [n for n in lengths if n and (n + 1 <= max_length or on_long == "truncate")]
        assert not kept
        return
    parts = report.num_examples + report.num_dropped + report.num_unsupervised
    assert parts == report.num_records == len(lengths)
    assert report.num_examples == len(examples)
    for example in examples:
        length = lengths[example.example_id]
        assert len(example.input_ids) == min(length + 1, max_length)
        assert (example.input_ids[-1] == END) == (length + 1 <= max_length)


def test_columns_are_mapped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"problem": "a", "solution": "b", "answer": "3", "tools": [1]}\n{"problem": "c"}'
    )
    records = read_records(path, columns={"question": "problem", "answer": "solution"})
    assert records == [{"question": "a", "answer": "b"}, {"question": "c"}]
    with pytest.raises(UserError, match="no column task; the columns are: problem, solution"):
        read_records(path, columns={"question": "task"})


def test_limit_and_split(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\nnot JSON')
    assert read_records(str(path), limit=1) == [{"text": "a"}]
    with pytest.raises(UserError, match="limit must be at least 1"):
        read_records(path, limit=0)
    with pytest.raises(UserError, match="has no split 'test'"):
        read_records(path, split="test")


def test_source_that_is_no_file(tmp_path):
    for name in ("none.jsonl", "none.csv.gz"):
        with pytest.raises(UserError, match="no such file"):
            read_records(str(tmp_path / name))
    with pytest.raises(UserError, match="no such file"):
        read_records(tmp_path / "none")
    with pytest.raises(UserError, match="is a folder"):
        read_records(str(tmp_path))


def test_hub_dataset(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load(name, configuration, *, split):
        calls.append((name, configuration, split))
        return datasets.Dataset.from_list([{"problem": "a", "solution": "b", "id": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    records = read_records("org/name:main", split="test", limit=5)
    assert list(records) == [{"problem": "a", "solution": "b", "id": 1}]
    mapped = read_records("org/name", columns={"question": "problem", "answer": "solution"})
    assert list(mapped) == [{"question": "a", "answer": "b"}]
    assert calls == [("org/name", "main", "test[:5]"), ("org/name", None, "train")]
    with pytest.raises(UserError, match="no column task; the columns are: problem, solution, id"):
        read_records("org/name", columns={"text": "task"})


def test_hub_dataset_that_cannot_be_loaded(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load(*_args, **_options):
        raise RuntimeError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"no local file and cannot be loaded .*no network"):
        read_records("org/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'mars-lm\[train\]'"):
        read_records("org/name")


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not here")
def test_gsm8k(tiny_tokenizer):
    records = read_records(GSM8K, limit=200)
    examples, report = build(records, tiny_tokenizer, max_length=4096)
    assert report.format == "question/answer"
    assert len(examples) == 200
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()[:200]]
    for example, answer in zip(examples, answers, strict=True):
        pairs = zip(example.input_ids, example.supervised, strict=True)
        learnt = tiny_tokenizer.decode([token for token, target in pairs if target])
        assert learnt == f"{answer}<|im_end|>"
