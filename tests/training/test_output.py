"""The output folder: free or in use, complete or half-saved checkpoints, the finished model."""

import json
from pathlib import Path

import pytest

from mars.errors import UserError
from mars.training.output import PARTIAL, check_free, replace_model, resume_point

FILES = ["model.safetensors", "optimizer.pt", "trainer_state.json"]


def make_checkpoint(folder: Path, step: int, names: list[str] = FILES) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    for name in names:
        (checkpoint / name).write_text("{}")
    return checkpoint


def resume(folder: Path, wanted: str | bool | None = "true", *, needs_optimizer: bool = True):
    """Return the choice and what was told."""
    told: list[str] = []
    choice = resume_point(folder, wanted, needs_optimizer=needs_optimizer, tell=told.append)
    return choice, told


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "log.jsonl"])
@pytest.mark.parametrize("wanted", [None, "false", "False", False])
def test_a_folder_in_use(tmp_path, name, wanted):
    assert resume(tmp_path, wanted) == (None, [])
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"{name}.*resume_from_checkpoint"):
        resume(tmp_path, wanted)


def test_a_checkpoint_is_in_use_and_a_file_is_no_folder(tmp_path):
    make_checkpoint(tmp_path, 2, names=[])
    with pytest.raises(UserError, match="checkpoint-2"):
        check_free(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        check_free(tmp_path / "file")


@pytest.mark.parametrize("wanted", ["true", "True", True])
@pytest.mark.parametrize("missing", FILES)
def test_the_newest_complete_checkpoint(tmp_path, missing, wanted):
    make_checkpoint(tmp_path, 9)
    expected = make_checkpoint(tmp_path, 10)
    half = make_checkpoint(tmp_path, 11, [name for name in FILES if name != missing])
    choice, told = resume(tmp_path, wanted)
    assert choice == str(expected)
    assert len(told) == 1
    assert str(half) in told[0]
    with pytest.raises(UserError, match="not a checkpoint"):
        resume(tmp_path, str(half))


def test_a_state_cut_in_the_middle_is_not_complete(tmp_path):
    (make_checkpoint(tmp_path, 1) / "trainer_state.json").write_text('{"epo')
    choice, told = resume(tmp_path)
    assert choice is None
    assert "beginning" in told[-1]


@pytest.mark.parametrize(
    "names",
    [
        ["adapter_model.safetensors", "optimizer.pt"],
        ["model-00001-of-00002.safetensors", "optimizer.bin"],
        ["pytorch_model_fsdp_0", "optimizer_0"],
        ["global_step5"],
    ],
)
def test_other_complete_checkpoints(tmp_path, names):
    expected = make_checkpoint(tmp_path, 5, [*names, "trainer_state.json"])
    assert resume(tmp_path) == (str(expected), [])


def test_checkpoints_saved_without_optimizer(tmp_path):
    expected = make_checkpoint(tmp_path, 5, ["model.safetensors", "trainer_state.json"])
    assert resume(tmp_path)[0] is None
    assert resume(tmp_path, needs_optimizer=False) == (str(expected), [])


def test_a_checkpoint_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        resume(tmp_path, str(tmp_path / "nowhere"))


def test_config_is_absent_while_files_are_moved(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('"old"')
    partial = tmp_path / PARTIAL
    partial.mkdir()
    for name in ("a.json", "config.json", "model.safetensors"):
        (partial / name).write_text('"new"')
    move, absent = Path.replace, []

    def watch(self, target):
        absent.append(not (tmp_path / "config.json").exists())
        return move(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    replace_model(tmp_path)
    assert absent == [True] * 3
    assert json.loads((tmp_path / "config.json").read_text()) == "new"
    assert not partial.exists()
