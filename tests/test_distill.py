"""Self-distillation: what is asked, what is written, and that a run can be taken up anywhere."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mars.checkpoint import Checkpoint
from mars.data import PromptRecord, build_examples, read_records
from mars.decoding.generate import generate
from mars.decoding.options import DecodingOptions
from mars.distill import Tally, answer_options, check_output, distill
from mars.errors import UserError

QUESTIONS = ["one", "two two two two", "3", "what?", "a longer question, with more tokens"]
TEMPERATURES = (0.0, 0.7, 1.5)


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    return tiny_checkpoint("llama")


def ask(*questions: str) -> list[PromptRecord]:
    return [PromptRecord(messages=[{"role": "user", "content": q}]) for q in questions]


def start(
    checkpoint: Checkpoint,
    prompts: list[PromptRecord],
    path: Path,
    temperatures: tuple[float, ...] = (0.0,),
    *,
    seed: int = 0,
    max_new_tokens: int = 8,
    batch_size: int = 3,
) -> Iterator[Tally]:
    options = answer_options(temperatures, seed=seed, top_p=1.0, max_new_tokens=max_new_tokens)
    return distill(checkpoint, prompts, path, options, batch_size=batch_size)


def run(*arguments: Any, **settings: Any) -> Tally:
    *_, tally = start(*arguments, **settings)
    assert tally.num_done == tally.num_wanted
    return tally


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_key(path: Path) -> dict[tuple, list[int]]:
    answers = {}
    for r in written(path):
        answers[r["messages"][0]["content"], r["temperature"], r["seed"]] = r["answer_ids"]
    return answers


def test_greedy_answers_are_those_of_generate(llama, tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    tally = run(llama, ask(*QUESTIONS), path)
    assert (tally.num_written, tally.num_found) == (5, 0)
    assert tally.num_tokens == sum(len(r["answer_ids"]) for r in written(path))
    for record in written(path):
        prompt, reply = record["messages"]
        wanted = generate(llama, [prompt], DecodingOptions(mode="ar", max_new_tokens=8))
        (wanted,) = wanted if isinstance(wanted, list) else [wanted]
        assert reply == {"role": "assistant", "content": wanted.text}
        assert record["answer_ids"] == wanted.token_ids
        assert record["finish_reason"] == wanted.finish_reason
        assert (record["temperature"], record["seed"], record["model"]) == (0.0, 0, "tiny-llama")
        assert "source" not in record


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_answers_depend_on_neither_order_nor_batch(llama, tmp_path, batch_size):
    run(llama, ask(*QUESTIONS), tmp_path / "a.jsonl", TEMPERATURES)
    prompts, temperatures = ask(*reversed(QUESTIONS[1:])), TEMPERATURES[::-1]
    run(llama, prompts, tmp_path / "b.jsonl", temperatures, batch_size=batch_size)
    a, b = by_key(tmp_path / "a.jsonl"), by_key(tmp_path / "b.jsonl")
    assert {key: ids for key, ids in a.items() if key[0] != "one"} == b
    assert len({tuple(ids) for ids in a.values()}) == len(a), "answers of their own"


def test_seeds_give_other_answers_but_not_to_greedy_decoding(llama, tmp_path):
    path = tmp_path / "a.jsonl"
    run(llama, ask("one"), path, (0.0, 1.0), seed=1)
    tally = run(llama, ask("one"), path, (0.0, 1.0), seed=2)
    assert (tally.num_found, tally.num_written) == (1, 1)
    assert [(r["temperature"], r["seed"]) for r in written(path)[2:]] == [(1.0, 2)]
    assert len({tuple(ids) for ids in by_key(path).values()}) == 3


def test_the_same_command_again_asks_nothing(llama, tmp_path):
    path = tmp_path / "a.jsonl"
    run(llama, ask(*QUESTIONS), path, TEMPERATURES)
    before = path.read_bytes()
    tally = run(llama, ask(*QUESTIONS), path, TEMPERATURES)
    assert (tally.num_found, tally.num_written, tally.num_tokens) == (15, 0, 0)
    assert path.read_bytes() == before


def test_prompts_and_temperatures_can_be_added(llama, tmp_path):
    path = tmp_path / "a.jsonl"
    run(llama, ask(*QUESTIONS[:2]), path)
    tally = run(llama, ask(*QUESTIONS), path, (0.7, 0.0))
    assert (tally.num_found, tally.num_written) == (2, 8)
    run(llama, ask(*QUESTIONS), tmp_path / "b.jsonl", (0.0, 0.7))
    assert by_key(path) == by_key(tmp_path / "b.jsonl")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupted_run_goes_on(llama, tmp_path, interruption):
    path = tmp_path / "a.jsonl"
    tallies: Any = start(llama, ask(*QUESTIONS), path, TEMPERATURES)
    while next(tallies).num_written < 4:
        pass
    with pytest.raises(interruption):
        tallies.throw(interruption)
    assert len(written(path)) == 4
    tally = run(llama, ask(*QUESTIONS), path, TEMPERATURES)
    assert (tally.num_found, tally.num_written) == (4, 11)
    run(llama, ask(*QUESTIONS), tmp_path / "b.jsonl", TEMPERATURES)
    assert by_key(path) == by_key(tmp_path / "b.jsonl")


@pytest.mark.parametrize("cut", [1, 2, 40, -3, -20])
def test_half_a_last_line_is_dropped(llama, tmp_path, cut):
    """1: only the newline is missing, so the record is whole; negative: only so much is there."""
    path = tmp_path / "a.jsonl"
    run(llama, ask(*QUESTIONS), path)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[:-cut] if cut > 0 else whole[: last - cut])
    tally = run(llama, ask(*QUESTIONS), path)
    assert tally.num_found == (5 if cut == 1 else 4)
    assert path.read_bytes() == whole


def test_identical_prompts_are_answered_once(llama, tmp_path):
    first = PromptRecord(messages=ask("one")[0].messages, source="here")
    tally = run(llama, [first, *ask("one", "3", "one")], tmp_path / "a.jsonl", (0.0, 0.7))
    assert (tally.num_wanted, tally.num_identical_prompts, tally.num_written) == (4, 2, 4)
    assert "identical prompts left out: 2" in tally.describe()
    sources = [r.get("source") for r in written(tmp_path / "a.jsonl")]
    assert sorted(sources, key=str) == [None, None, "here", "here"]


COLD = (0.0, 0.001, 0.002)  # at such temperatures the answers are the greedy ones


@pytest.mark.parametrize("split", [False, True], ids=["one run", "two runs"])
def test_identical_answers_are_written_once_and_not_asked_for_again(llama, tmp_path, split):
    path = tmp_path / "a.jsonl"
    if split:
        run(llama, ask(*QUESTIONS), path)
    tally = run(llama, ask(*QUESTIONS), path, COLD)
    assert tally.num_repeated == 10
    assert len(written(path)) == 5
    again = run(llama, ask(*QUESTIONS), path, COLD)
    assert (again.num_found, again.num_tokens) == (15, 0)
    assert sum(len(r["repeats"].split()) for r in written(path)) == 10
    assert len({tuple(r["answer_ids"]) for r in written(path)}) == 5


def test_repeats_are_remembered_when_a_run_is_interrupted(llama, tmp_path):
    path = tmp_path / "a.jsonl"
    tallies: Any = start(llama, ask(*QUESTIONS), path, COLD)
    while next(tallies).num_repeated < 3:
        pass
    done = len(written(path)) + 3
    tallies.close()
    assert run(llama, ask(*QUESTIONS), path, COLD).num_found == done


def test_long_prompts_are_left_out_and_counted(llama, tmp_path):
    path = tmp_path / "a.jsonl"
    tally = run(llama, ask("one", "x" * 500, "x" * 460), path, (0.0, 0.7))
    assert (tally.num_too_long, tally.num_written) == (2, 4)
    assert "too long for the model's context and left out: 2" in tally.describe()
    with pytest.raises(UserError, match=r"all 1 prompts are too long.* context of 512 tokens"):
        run(llama, ask("x" * 500), tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


def test_many_chunks(llama, tmp_path, monkeypatch):
    run(llama, ask(*QUESTIONS), tmp_path / "a.jsonl", TEMPERATURES)
    monkeypatch.setattr("mars.distill.CHUNK_ROWS", 1)
    run(llama, ask(*QUESTIONS), tmp_path / "b.jsonl", TEMPERATURES, batch_size=2)
    assert by_key(tmp_path / "a.jsonl") == by_key(tmp_path / "b.jsonl")


def strip_names(path: Path) -> None:
    """Make a file of records that do not name their model."""
    named = ("model", "fingerprint", "repeats", "top_p")
    records = [{k: v for k, v in r.items() if k not in named} for r in written(path)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_answers_of_another_model_are_refused(llama, tiny_checkpoint, tmp_path):
    path = tmp_path / "a.jsonl"
    run(llama, ask(*QUESTIONS), path)
    other = tiny_checkpoint("llama", seed=1)
    other.name = "other"
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"line 1: .*'tiny-llama' \(other weights\).* 'other'"):
        run(other, ask(*QUESTIONS), path)
    assert path.read_bytes() == before


def test_records_without_a_model_are_checked_by_their_tokens(llama, tmp_path):
    path = tmp_path / "a.jsonl"
    run(llama, ask(*QUESTIONS), path)
    strip_names(path)
    assert run(llama, ask(*QUESTIONS), path).num_found == 5
    path.write_text(path.read_text().replace('"prompt_ids": [', '"prompt_ids": [7, '))
    with pytest.raises(UserError, match="line 1: this answer was given by another model"):
        run(llama, ask(*QUESTIONS), path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("my notes", "line 1: not valid JSON"),
        ('{"question": "a", "answer": "b"}\n', "line 1: this is no record of `mars distill`"),
        ("[1]\n", "line 1: this is no record"),
        ('{"messages": "x", "temperature": 0, "seed": 0}\n', "line 1: this is no record"),
        ('{"messages": [{"role": "user", "content"\n\n', "line 1: not valid JSON"),
    ],
)
def test_files_of_something_else_are_left_alone(llama, tmp_path, content, words):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=words):
        run(llama, ask("one"), path)
    assert path.read_text() == content


def test_the_file_is_training_data(llama, tmp_path):
    path = tmp_path / "a.jsonl"
    run(llama, ask(*QUESTIONS), path, TEMPERATURES, max_new_tokens=40)
    records = written(path)
    assert {r["finish_reason"] for r in records} == {"stop", "length"}
    examples, report = build_examples(
        read_records(path), llama.tokenizer, max_length=256, eos_token_ids=llama.eos_token_ids
    )
    assert (report.format, report.ignored_columns) == ("distilled", ())
    assert len(examples) == len(records)
    for example, record in zip(examples, records, strict=True):
        assert example.input_ids == record["prompt_ids"] + record["answer_ids"]
        ends = record["answer_ids"][-1] in llama.eos_token_ids
        assert ends == (record["finish_reason"] == "stop")


@pytest.mark.parametrize(
    ("name", "words"), [("", "is a folder"), ("a.json", "name the file a.jsonl"), ("p.jsonl", "p")]
)
def test_check_output(tmp_path, name, words):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    check_output(tmp_path / "fine.jsonl", tmp_path / "p.jsonl")
    with pytest.raises(UserError, match=words):
        check_output(tmp_path / name, tmp_path / "p.jsonl")
