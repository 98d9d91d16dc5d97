"""`mars bench`: the comparison itself, then the command."""

import json

import pytest

from mars.cli.bench import Run, label, summarise
from mars.decoding.options import DecodingOptions


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "exact"),
        ({"mode": "ar"}, "ar"),
        ({"window": 0}, "exact, window 0"),
        ({"window": 0, "ngram": False}, "ar (exact, window 0)"),
        ({"mode": "threshold", "threshold": 0.9}, "threshold 0.9"),
        ({"mode": "threshold", "threshold": 1.0}, "ar (threshold 1.0)"),
        ({"mode": "threshold", "window": 0}, "ar (threshold 0.9, window 0)"),
    ],
)
def test_rows_are_called_what_they_are(options, wanted):
    assert label(DecodingOptions(**options)) == wanted


def test_ratios_are_taken_within_a_repeat():
    def run(seconds: float, forwards: int) -> Run:
        return Run(seconds=seconds, token_ids=[[1] * 100], forwards=forwards)

    # The machine slows down tenfold from repeat to repeat; threshold is twice as fast in each.
    slow = (1.0, 10.0, 100.0)
    runs = {"ar": [run(s, 100) for s in slow], "fast": [run(s / 2, 50) for s in slow]}
    ar, fast = summarise(runs)
    assert (ar.ratio, fast.ratio) == (1.0, 2.0)
    assert (ar.tokens_per_second, fast.tokens_per_second) == (10.0, 20.0)
    assert (ar.tokens_per_forward, fast.tokens_per_forward) == (1.0, 2.0)
    assert fast.repeats == [200.0, 20.0, 2.0]


def test_command(mars, folder, tmp_path):
    file, prompts = tmp_path / "bench.json", tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    outcome = mars(
        *("bench", "--model", folder, "--prompts", prompts, "--max-new-tokens", 12),
        *("--threshold", 0.0, "--threshold", 1.0, "--repeats", 2, "--json", file),
    )
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(file.read_text())
    assert {"python", "torch", "transformers", "mars", "cpu", "threads"} <= set(
        record["environment"]
    )
    ar, exact, eager, careful = record["rows"]
    wanted = ["ar", "exact", "threshold 0.0", "ar (threshold 1.0)"]
    assert [row["mode"] for row in record["rows"]] == wanted
    assert exact["identical_outputs"] == 1
    assert ar["tokens_per_forward"] == ar["ratio"] == ar["identical_outputs"] == 1
    assert eager["tokens_per_forward"] > 2
    assert eager["identical_outputs"] < 1
    assert careful["tokens_per_forward"] == careful["identical_outputs"] == 1
    assert all(len(row["repeats"]) == 2 and min(row["repeats"]) > 0 for row in record["rows"])
    for words in ("TPF", "threshold 0.0", "transformers", "tokens/s"):
        assert words in outcome.stdout


def test_built_in_prompts(mars, folder):
    outcome = mars("bench", "--model", folder, "--max-new-tokens", 2, "--repeats", 1)
    assert outcome.exit_code == 0, outcome.stderr
    assert "prompts: 8" in outcome.stdout


def test_a_plain_model_is_measured_without_masks(mars, fails, plain_folder):
    command = ["bench", "--model", plain_folder, "--max-new-tokens", 4, "--repeats", 1]
    assert "exact " in mars(*command).stdout
    assert "mars train" in fails(*command, "--threshold", 0.5)


def test_the_options_of_the_exact_mode_arrive(mars, folder, tmp_path):
    file = tmp_path / "bench.json"
    options = {"layout": "linear", "window": 2, "ngram": False, "draft_threshold": 0.25}
    outcome = mars(
        *("bench", "--model", folder, "--max-new-tokens", 4, "--repeats", 1, "--json", file),
        *("--layout", "linear", "--window", 2, "--no-ngram", "--draft-threshold", 0.25),
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert options.items() <= json.loads(file.read_text())["settings"].items()


def test_the_json_file_is_checked_before_the_work(fails, tmp_path):
    command = ["bench", "--model", "unused", "--json"]
    assert "no folder" in fails(*command, tmp_path / "a" / "b.json")
    assert "is a folder" in fails(*command, tmp_path)


def test_bad_options(fails, folder):
    assert "window 9" in fails("bench", "--model", folder, "--window", 9)
    assert "threshold" in fails("bench", "--model", folder, "--threshold", -1)
