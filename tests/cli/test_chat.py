"""`mars chat` with its standard input from a pipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mars.checkpoint import Checkpoint, load
from mars.cli.chat import converse
from mars.decoding.generate import generate
from mars.decoding.options import DecodingOptions

SHORT = ["--max-new-tokens", 10, "--threshold", 0.3]
OPTIONS = DecodingOptions(mode="threshold", max_new_tokens=10, threshold=0.3)


def answers(folder: Path, turns: list[str]) -> list[str]:
    """Return what the model says to each turn, given all before."""
    checkpoint = load(folder, device="cpu")
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = generate(checkpoint, messages, OPTIONS).text
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages[1::2]]


def test_answers_know_the_turns_before(mars, folder):
    outcome = mars("chat", "--model", folder, *SHORT, stdin="hello\n\nand then?\n")
    assert outcome.exit_code == 0, outcome.stderr
    wanted = answers(folder, ["hello", "and then?"])
    assert wanted[1] != answers(folder, ["and then?"])[0]
    assert outcome.stdout == "".join(answer + "\n" for answer in wanted)
    assert outcome.stderr.count("TPF") == outcome.stderr.count("tokens/s") == 2


def test_reset_forgets_and_quit_ends(mars, folder):
    stdin = "hello\n/reset\nand then?\n/quit\nunheard\n"
    outcome = mars("chat", "--model", folder, *SHORT, stdin=stdin)
    wanted = answers(folder, ["hello"]) + answers(folder, ["and then?"])
    assert outcome.stdout == "".join(answer + "\n" for answer in wanted)


def test_unknown_commands_are_not_sent_to_the_model(mars, folder):
    outcome = mars("chat", "--model", folder, stdin="/help\n")
    assert outcome.stdout == ""
    assert "Unknown command /help" in outcome.stderr


@pytest.mark.parametrize(("flags", "mode"), [([], "exact"), (["--mode", "ar"], "ar")])
def test_a_plain_model_chats(mars, plain_folder, flags, mode):
    command = ["chat", "--model", plain_folder, "--max-new-tokens", 10, *flags]
    outcome = mars(*command, stdin="hello\n")
    assert outcome.exit_code == 0
    assert ("plain AR model" in outcome.stderr) == (mode == "exact")
    assert f"[{mode}: " in outcome.stderr


def test_a_full_context_is_an_error_in_a_pipe(fails, folder):
    assert "context" in fails("chat", "--model", folder, stdin="long " * 200 + "\n")


def test_a_full_context_does_not_end_a_conversation(
    tiny_checkpoint: Callable[..., Checkpoint], capsys: pytest.CaptureFixture[Any]
):
    turns = iter(["long " * 200, "hello"])
    converse(tiny_checkpoint("llama"), OPTIONS, turns, is_fatal=False)
    shown = capsys.readouterr()
    assert "error: " in shown.err
    assert "/reset" in shown.err
    assert len(shown.out) > 1  # the second turn, without the first, was answered


@pytest.mark.parametrize(
    ("option", "words"), [(["--window", 9], "window 9"), (["--mode", "threshold"], "mars train")]
)
def test_what_the_model_cannot_do_is_refused_before_the_first_turn(
    fails, folder, plain_folder, option, words
):
    model = folder if "--window" in option else plain_folder
    assert words in fails("chat", "--model", model, *option, stdin="")


def test_bad_option(fails, folder):
    assert "temperature" in fails("chat", "--model", folder, "--temperature", -1, stdin="x\n")
