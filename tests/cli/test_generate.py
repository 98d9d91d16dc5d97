"""`mars generate`: prompts in, answers out, in order."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mars.cli.generate as command
from mars.checkpoint import load
from mars.cli.generate import JSON_KEYS, heading, in_order
from mars.decoding.generate import generate
from mars.decoding.options import DecodingOptions

QUESTIONS = ["one", "two two two two two two", "3"]
SHORT = ["--max-new-tokens", 12, "--threshold", 0.3]


def records(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines()]


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def expected(folder: Path, prompts: list[Any], **options: Any) -> list[dict[str, Any]]:
    options = {"max_new_tokens": 12, "threshold": 0.3} | options
    results = generate(load(folder, device="cpu"), prompts, **options)
    return [{key: getattr(result, key) for key in JSON_KEYS} for result in results]


def test_json_has_the_promised_fields_and_the_answers_of_the_python_interface(mars, folder):
    outcome = mars("generate", "hello", "--model", folder, "--json", *SHORT)
    assert outcome.exit_code == 0, outcome.stderr
    (record,) = records(outcome.stdout)
    assert list(record) == list(JSON_KEYS)
    assert comparable(record) == comparable(expected(folder, ["hello"])[0])
    assert record["seconds"] > 0


SAMPLER = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "seed": 7,
}


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "threshold", "threshold": 0.2, "confidence": "margin", "window": 2},
        {"mode": "exact", "layout": "partial", "max_groups": 2, "draft_threshold": 0.01},
    ],
    ids=["threshold", "exact"],
)
def test_every_option_reaches_the_decoder(mars, folder, monkeypatch, options):
    options |= SAMPLER | {"max_new_tokens": 9}
    seen = []
    prepare_all = command.prepare_all
    monkeypatch.setattr(
        command, "prepare_all", lambda c, p, o, **k: seen.append(o) or prepare_all(c, p, o, **k)
    )
    flags = [part for k, v in options.items() for part in (f"--{k.replace('_', '-')}", v)]
    outcome = mars("generate", "hello", "--model", folder, "--json", "--no-ngram", *flags)
    assert outcome.exit_code == 0, outcome.stderr
    assert seen == [DecodingOptions(ngram=False, **options)]
    wanted = generate(load(folder, device="cpu"), ["hello"], seen[0])
    wanted = {key: getattr(wanted[0], key) for key in JSON_KEYS}
    assert comparable(records(outcome.stdout)[0]) == comparable(wanted)


def test_exact_is_the_default_and_says_what_ar_says(mars, folder):
    flags = ["--model", folder, "--json", "--max-new-tokens", 30]
    exact, ar = (
        records(mars("generate", "hello", *flags, *mode).stdout)[0]
        for mode in ([], ["--mode", "ar"])
    )
    assert (exact["mode"], ar["mode"]) == ("exact", "ar")
    assert exact["token_ids"] == ar["token_ids"]


def test_logprobs_stand_in_the_json(mars, fails, folder):
    flags = ["generate", "hello", "--model", folder, "--max-new-tokens", 5, "--logprobs", 2]
    (record,) = records(mars(*flags, "--json").stdout)
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    for entry in record["logprobs"]:
        assert entry["logprob"] == pytest.approx(max(entry["top"].values()))  # greedy
        assert len(entry["top"]) == 2
    assert "--json" in fails(*flags)
    assert "threshold" in fails(*flags, "--json", "--threshold", 0.5)


def test_tau_in_another_mode_is_refused(fails, folder):
    flags = ["--mode", "exact", "--threshold", 0.5]
    assert "--threshold belongs to" in fails("generate", "x", "--model", folder, *flags)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_file_is_answered_in_its_order(mars, folder, tmp_path, batch_size):
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    lines = [QUESTIONS[0], json.dumps({"messages": messages}), json.dumps({"prompt": QUESTIONS[2]})]
    file.write_text("\n".join(lines))
    outcome = mars(
        "generate",
        "--prompts",
        file,
        "--model",
        folder,
        "--json",
        "--batch-size",
        batch_size,
        *SHORT,
    )
    assert outcome.exit_code == 0, outcome.stderr
    wanted = expected(folder, [QUESTIONS[0], messages, QUESTIONS[2]])
    assert [*map(comparable, records(outcome.stdout))] == [*map(comparable, wanted)]


def test_standard_input_holds_one_prompt_a_line(mars, folder):
    stdin = "\n".join(QUESTIONS)
    outcome = mars("generate", "--model", folder, "--json", *SHORT, stdin=stdin)
    wanted = expected(folder, QUESTIONS)
    assert [*map(comparable, records(outcome.stdout))] == [*map(comparable, wanted)]


def test_raw_text_does_not_go_through_the_chat_template(mars, folder):
    outcome = mars("generate", "hello", "--raw", "--model", folder, "--json", *SHORT)
    wanted = expected(folder, ["hello"], raw=True)
    assert comparable(records(outcome.stdout)[0]) == comparable(wanted[0])
    assert wanted[0]["token_ids"] != expected(folder, ["hello"])[0]["token_ids"]


def test_stop_may_be_repeated(mars, folder):
    text = expected(folder, ["hello"])[0]["text"]
    stops = [text[4], text[2]]
    flags = ["--stop", stops[0], "--stop", stops[1]]
    outcome = mars("generate", "hello", "--model", folder, "--json", *SHORT, *flags)
    (record,) = records(outcome.stdout)
    assert record["text"] == text[: min(text.index(stop) for stop in stops)]
    assert record["finish_reason"] == "stop"


def test_text_output_is_the_answer_alone_and_figures_go_to_stderr(mars, folder):
    outcome = mars("generate", "hello", "--model", folder, *SHORT)
    assert outcome.stdout == expected(folder, ["hello"])[0]["text"] + "\n"
    assert "TPF" in outcome.stderr
    assert "tokens/s" in outcome.stderr


def test_text_output_of_several_prompts_has_headings(mars, folder):
    outcome = mars("generate", "--model", folder, *SHORT, stdin="\n".join(QUESTIONS))
    for number, wanted in enumerate(expected(folder, QUESTIONS), start=1):
        assert f"--- {number}: {wanted['prompt']}\n{wanted['text']}\n" in outcome.stdout


def test_a_plain_model_drafts_without_masks_and_says_so(mars, plain_folder):
    line = ["generate", "hello", "--model", plain_folder, "--json", "--max-new-tokens", 12]
    outcome = mars(*line)
    assert outcome.exit_code == 0
    assert records(outcome.stdout)[0]["mode"] == "exact"
    assert outcome.stderr.count("plain AR model") == 1
    outcome = mars(*line, "--no-ngram")
    assert records(outcome.stdout)[0]["mode"] == "ar"
    assert outcome.stderr == ""


def test_a_plain_model_refuses_the_threshold_mode(fails, plain_folder):
    message = fails("generate", "hello", "--model", plain_folder, "--mode", "threshold")
    assert "mars train" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", -1], "temperature"),
        (["--window", 9], "window 9 is larger than the block size 4"),
        (["--threshold", "nan"], "threshold"),
        (["--top-p", 0], "top_p"),
        (["--mode", "fast"], "exact, threshold, ar"),
        (["--layout", "quadratic"], "layout"),
        (["--draft-threshold", 2], "draft_threshold"),
        (["--dtype", "int8"], "dtype"),
        (["--max-new-tokens", 0], "max_new_tokens"),
        (["--max-new-tokens", 5000], "context"),
        (["--batch-size", 0], "batch-size"),
        (["--no-such-flag"], "no-such-flag"),
        (["--prompts", "x.jsonl"], "not both"),
    ],
)
def test_bad_options_are_named(fails, folder, flags, words):
    assert words in fails("generate", "hello", "--model", folder, *flags)


def test_an_error_names_the_prompt(fails, folder):
    message = fails("generate", "--model", folder, stdin="short\n" + "long " * 200)
    assert "prompt 2 of 2" in message
    assert "context" in message


@pytest.mark.parametrize("stdin", ["", "\n \n"])
def test_no_prompt(fails, folder, stdin):
    assert "no prompts" in fails("generate", "--model", folder, stdin=stdin)


def test_standard_input_that_is_not_text(mars, folder):
    outcome = mars("generate", "--model", folder, stdin=b"\xff\xfe\x00")
    assert outcome.exit_code == 2
    assert "UTF-8" in outcome.stderr


def test_missing_prompts_file(fails, folder, tmp_path):
    assert "cannot be read" in fails("generate", "--prompts", tmp_path / "x", "--model", folder)


def test_unusable_models(fails, edited):
    block = {"block_size": 4, "mask_token_id": 260, "adapter": "full", "format_version": 1}
    assert "outside the vocabulary" in fails("generate", "x", "--model", edited(mars=block))


def test_sliding_window_models_are_refused(fails, edited):
    window = {"model_type": "mistral", "sliding_window": 16, "mars": None}
    assert "sliding-window" in fails("generate", "x", "--model", edited(**window))


def test_unknown_model(fails, tmp_path):
    assert "Cannot load" in fails("generate", "x", "--model", "nobody/nothing")
    assert "Cannot load" in fails("generate", "x", "--model", tmp_path)


def test_results_come_in_order_and_as_soon_as_they_can():
    taken = []

    def events():
        for index in [1, 2, 0, 3]:
            taken.append(index)
            yield SimpleNamespace(index=index, result=None)  # news that ends nothing
            yield SimpleNamespace(index=index, result=index)

    seen = [(result, len(taken)) for result in in_order(events())]
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 4)]


def test_headings_are_one_short_line():
    assert heading("a\nb") == "a b"
    assert heading([{"role": "user", "content": "x" * 99}]) == "x" * 57 + "..."
