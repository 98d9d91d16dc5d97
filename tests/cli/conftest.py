"""Run commands in this process, on tiny checkpoints in temporary folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result as Outcome
from typer.testing import CliRunner

from mars.checkpoint import Checkpoint, load
from mars.cli.main import app
from mars.gated import GatedAdapter, GatedConfig, all_linear, fingerprint

Mars = Callable[..., Outcome]


@pytest.fixture(scope="session")
def mars() -> Mars:
    """Run `mars ARGUMENTS`; an exception that the command line does not handle fails the test."""

    def run(*arguments: Any, stdin: str | bytes | None = None) -> Outcome:
        arguments = [str(argument) for argument in arguments]
        return CliRunner().invoke(
            app, arguments, input=stdin, catch_exceptions=False, prog_name="mars"
        )

    return run


@pytest.fixture(scope="session")
def fails(mars: Mars) -> Callable[..., str]:
    """Run a command that must fail: status 2, one clear message, nothing on stdout."""

    def run(*arguments: object, stdin: str | None = None) -> str:
        outcome = mars(*arguments, stdin=stdin)
        assert outcome.exit_code == 2, outcome.output
        assert outcome.stdout == ""
        assert "Traceback" not in outcome.stderr
        assert "rror: " in outcome.stderr
        return outcome.stderr

    return run


@pytest.fixture(scope="session")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Checkpoint]
) -> Path:
    """A saved checkpoint with block size 4."""
    path = tmp_path_factory.mktemp("checkpoints") / "mars"
    tiny_checkpoint("llama").save(path)
    return path


@pytest.fixture(scope="session")
def plain_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Checkpoint]
) -> Path:
    """The same without a `mars` block: a plain AR model."""
    path = tmp_path_factory.mktemp("checkpoints") / "plain"
    checkpoint = tiny_checkpoint("llama")
    checkpoint.mars = None
    checkpoint.save(path)
    return path


@pytest.fixture
def edited(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies `folder` with changes to its config.json."""

    def make(**changes: Any) -> Path:
        copy = tmp_path / "edited"
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | changes))
        return copy

    return make


@pytest.fixture(scope="session")
def gated_folder(tmp_path_factory: pytest.TempPathFactory, plain_folder: Path) -> Path:
    """A gated adapter for `plain_folder`, block size 3, with random weights."""
    path = tmp_path_factory.mktemp("adapters") / "gated"
    save_random_adapter(plain_folder, path)
    return path


def save_random_adapter(base: Path, path: Path) -> None:
    model = load(base, device="cpu").model
    config = GatedConfig(
        base=str(base),
        fingerprint=fingerprint(model),
        block_size=3,
        rank=2,
        targets=all_linear(model),
        mask_embeddings=3,
    )
    adapter = GatedAdapter(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    adapter.save(path)
