"""The command line as a whole: help, version, and how it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mars import UserError, __version__

COMMANDS = ["pull", "data", "distill", "sft", "train", "merge", "generate", "chat", "bench", "demo"]


def test_help_lists_every_command(mars):
    outcome = mars("--help")
    assert outcome.exit_code == 0
    listed = [
        line.split()[0] for line in outcome.stdout.partition("Commands:")[2].split("\n") if line
    ]
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "data preview"])
def test_every_command_has_help(mars, command):
    outcome = mars(*command.split(), "--help")
    assert outcome.exit_code == 0
    assert f"mars {command} " in outcome.stdout


def test_version(mars):
    assert mars("--version").stdout.strip() == __version__


def test_unknown_command(fails):
    assert "nope" in fails("nope")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UserError("do this instead"), 2, "error: do this instead"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: [Errno 13] Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_messages(mars, monkeypatch, error, status, words):
    def broken(**kwargs):
        raise error

    monkeypatch.setattr("mars.default_model.ensure_default_model", broken)
    outcome = mars("pull")
    assert outcome.exit_code == status
    assert words in outcome.stderr
    assert outcome.stdout == ""


def test_bugs_are_not_hidden(mars, monkeypatch):
    def broken(**kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("mars.default_model.ensure_default_model", broken)
    with pytest.raises(ZeroDivisionError):
        mars("pull")


def mars_process(code: str, **kwargs) -> subprocess.Popen:
    """Start a command line in which `ensure_default_model` is replaced by `code`."""
    program = (
        "import signal, sys, time\n"
        # A process started in the background inherits that Ctrl-C is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import mars.default_model as module\n"
        "from mars.cli.main import run\n"
        f"def replaced(**kwargs):\n    {code}\n"
        "module.ensure_default_model = replaced\n"
        "sys.argv = ['mars', 'pull', '--path']\n"
        "run()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, **kwargs
    )


def test_control_c_ends_with_130():
    process = mars_process("print('ready', flush=True); time.sleep(60)", stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "interrupted\n"


@pytest.mark.parametrize("code", ["return 'x'", "print('x' * 100_000); return 'x'"])
def test_a_broken_pipe_ends_quietly(code):
    reading, writing = os.pipe()
    os.close(reading)
    process = mars_process(code, stdout=writing)
    os.close(writing)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert stderr == ""
