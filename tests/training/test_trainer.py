"""Training runs on a tiny model: what a step computes must not depend on how it is computed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mars.checkpoint import load
from mars.errors import UserError
from mars.training.arguments import parse_arguments
from mars.training.run import train


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **close) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **close)


def run(options: list[str], output: Path, *more: str) -> Path:
    return train(parse_arguments([*options, f"--output_dir={output}", *more]))


@pytest.mark.parametrize(
    "extra",
    [[], ["--masked_loss=distill", "--offset_decay=2"], ["--packing=True", "--max_length=128"]],
)
def test_gradient_accumulation_does_not_change_the_update(options, tmp_path, extra):
    whole = run(options, tmp_path / "whole", *extra)
    parts = run(
        options,
        tmp_path / "parts",
        *extra,
        "--per_device_train_batch_size=1",
        "--gradient_accumulation_steps=4",
    )
    assert_same_weights(weights(whole), weights(parts), atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
def test_gradient_checkpointing_does_not_change_the_update(options, tmp_path):
    plain = run(options, tmp_path / "plain")
    less_memory = run(options, tmp_path / "less", "--gradient_checkpointing=True")
    assert_same_weights(weights(plain), weights(less_memory), atol=1e-6, rtol=1e-5)


def test_two_processes_equal_one(options, tmp_path):
    one = run(options, tmp_path / "one")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += [
        "--num_processes=2",
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
    ]
    command += ["-m", "mars", "train", *options, f"--output_dir={tmp_path / 'two'}"]
    command += ["--per_device_train_batch_size=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_weights(weights(one), weights(tmp_path / "two"), atol=2e-5, rtol=1e-4)
    lines = [json.loads(x) for x in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    alone = [json.loads(x) for x in (tmp_path / "one" / "log.jsonl").read_text().splitlines()]
    for ours, theirs in zip(alone, lines, strict=True):  # one log, of the global batch
        assert ours.keys() == theirs.keys()
        for key in ("loss", "clean_nll", "mask1_accuracy"):
            if key in ours:
                assert theirs[key] == pytest.approx(ours[key], rel=1e-3)


def test_resume_goes_on_at_the_exact_step(options, tmp_path):
    more = ["--max_steps=6", "--save_strategy=steps", "--lr_scheduler_type=cosine"]
    straight = run(options, tmp_path / "straight", *more, "--save_steps=100")
    run(options, tmp_path / "stopped", *more, "--save_steps=3")
    stopped = tmp_path / "stopped"
    # What an interruption after step 3 leaves behind.
    for late in ("checkpoint-6", "model.safetensors"):
        subprocess.run(["rm", "-r", str(stopped / late)], check=True)
    resumed = run(options, stopped, *more, "--save_steps=3", "--resume_from_checkpoint=true")
    assert_same_weights(weights(straight), weights(resumed), atol=0, rtol=0)
    steps = [json.loads(x)["step"] for x in (stopped / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps), "the log repeats no step after a resume"


def test_an_earlier_run_is_not_overwritten(options, tmp_path):
    run(options, tmp_path / "a", "--save_strategy=steps", "--save_steps=2")
    with pytest.raises(UserError, match="resume_from_checkpoint"):
        run(options, tmp_path / "a")


def test_checkpoint_is_the_plain_model_it_was(options, tmp_path, tiny_folder):
    folder = run(options, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    before = json.loads((Path(tiny_folder) / "config.json").read_text())
    assert config["model_type"] == before["model_type"]
    assert config["mars"] == {
        "block_size": 4,
        "mask_token_id": 3,
        "adapter": "full",
        "format_version": 1,
    }
    assert weights(folder).keys() == weights(tiny_folder).keys()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model, "streams")
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(model(ids).logits, load(folder).model(ids).logits)


def test_log_has_losses_per_offset_and_probes_at_both_ends(options, tmp_path):
    folder = run(options, tmp_path / "run")
    lines = [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]
    probes = [x for x in lines if "probe_clean_nll" in x]
    assert [x["step"] for x in probes] == [0, 3]
    assert [x["step"] for x in lines if "loss" in x] == [1, 2, 3]
    for j in range(1, 5):
        assert f"probe_mask{j}_accuracy" in probes[0]
        assert f"mask{j}_nll" in lines[1]
    assert probes[0]["probe_tokens_per_forward"] >= 1


def test_sft_trains_the_clean_stream_alone(options, tmp_path):
    folder = run(options, tmp_path / "run", "--masked_weight=0")
    assert "mars" not in json.loads((folder / "config.json").read_text())
    lines = [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]
    assert not any(key.startswith("mask") for line in lines for key in line)
    assert lines[-1].get("train_loss", 0) > 0


def test_sft_equals_the_loss_of_transformers(options, tmp_path, tiny_folder):
    """One step of plain SGD: the difference of the weights is the gradient."""
    more = ["--masked_weight=0", "--max_steps=1", "--optim=sgd", "--probe_size=0"]
    args = parse_arguments([*options, *more, "--max_grad_norm=0", f"--output_dir={tmp_path}"])
    folder = train(args)
    from mars.data import Collator
    from mars.training.run import load_examples

    checkpoint = load(tiny_folder)
    examples, *_ = load_examples(args, checkpoint)
    generator = torch.Generator().manual_seed(42)
    order = torch.randperm(len(examples), generator=generator)[:4].tolist()
    batch = Collator(pad_token_id=0)([[examples[i]] for i in order])
    loss = checkpoint.model(
        batch["input_ids"], attention_mask=batch["document_ids"] >= 0, labels=batch["labels"]
    ).loss
    loss.backward()
    after = weights(folder)
    for name, parameter in checkpoint.model.named_parameters():
        step = parameter.detach() - 1e-2 * parameter.grad
        torch.testing.assert_close(after[name], step, atol=1e-6, rtol=1e-5)


def test_without_ar_loss_no_weight_decays_into_the_clean_outputs(options, tmp_path):
    folder = run(options, tmp_path / "run", "--clean_weight=0")
    lines = [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]
    assert not any("clean_nll" in line for line in lines if "loss" in line)


def test_lora_folder_loads_merged(options, tmp_path):
    folder = run(options, tmp_path / "run", "--method=lora", "--lora_rank=4")
    assert (folder / "adapter_config.json").exists()
    checkpoint = load(folder)
    assert checkpoint.mars.adapter == "lora"
    assert checkpoint.mask_token_id == 3
    before = load(checkpoint.model.config._name_or_path or parse_arguments(options).model).model
    same = torch.equal(
        checkpoint.model.model.layers[0].mlp.up_proj.weight,
        before.model.layers[0].mlp.up_proj.weight,
    )
    assert not same
    checkpoint.save(tmp_path / "merged")
    again = load(tmp_path / "merged")
    ids = torch.tensor([[5, 6, 3, 3]])
    torch.testing.assert_close(again.model(ids).logits, checkpoint.model(ids).logits)


def test_mask_id_outside_the_vocabulary(options, tmp_path):
    with pytest.raises(UserError, match="vocabulary of 260"):
        run(options, tmp_path / "run", "--mask_token_id=260")


def test_probe_cannot_swallow_the_data(options, tmp_path):
    with pytest.raises(UserError, match="probe_size"):
        run(options, tmp_path / "run", "--probe_size=40")
