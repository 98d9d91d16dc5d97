"""Training runs on a tiny model: what a step computes must not depend on how it is computed."""

import copy
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mars.checkpoint import load
from mars.errors import UserError
from mars.training import run as training
from mars.training.arguments import parse_arguments
from mars.training.output import PARTIAL
from mars.training.probe import Probe
from mars.training.run import save, train
from mars.training.trainer import MarsTrainer


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


def launch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run on two processes."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2"]
    command += ["--mixed_precision=no", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_two_processes_equal_one(options, tmp_path):
    one = run(options, tmp_path / "one")
    done = launch(
        *("--multi_gpu", "--num_machines=1", "--dynamo_backend=no", "-m", "mars", "train"),
        *(*options, f"--output_dir={tmp_path / 'two'}", "--per_device_train_batch_size=2"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_weights(weights(one), weights(tmp_path / "two"), atol=2e-5, rtol=1e-4)
    lines = [json.loads(x) for x in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    alone = [json.loads(x) for x in (tmp_path / "one" / "log.jsonl").read_text().splitlines()]
    for ours, theirs in zip(alone, lines, strict=True):  # one log, of the global batch
        assert ours.keys() == theirs.keys()
        for key in ("loss", "clean_nll", "mask1_accuracy"):
            if key in ours:
                assert theirs[key] == pytest.approx(ours[key], rel=1e-3)


def test_fsdp_equals_one_process_and_resumes(options, tmp_path):
    """The accelerate configuration of the recipes, on two CPU processes."""
    saving = ["--save_strategy=steps", "--save_steps=2", "--probe_size=0"]
    one = run(options, tmp_path / "one", *saving)
    two = tmp_path / "two"
    here = Path(__file__)
    fsdp = [
        *("--config_file", here.parents[2] / "recipes" / "accelerate" / "fsdp.yaml"),
        *(here.with_name("fsdp_on_cpu.py"), "train", *options, f"--output_dir={two}"),
        "--per_device_train_batch_size=2",
    ]
    refused = launch(*fsdp)
    assert "--probe_size 0" in refused.stderr
    for resume in ("false", "true"):
        done = launch(*fsdp, *saving, f"--resume_from_checkpoint={resume}")
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count("sharded: True") == 2
        assert "skipped" not in done.stderr
        assert_same_weights(weights(one), weights(two), atol=2e-5, rtol=1e-4)
        shutil.rmtree(two / "checkpoint-3")  # what an interruption after step 2 leaves behind
        (two / "model.safetensors").unlink()


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


@pytest.mark.parametrize(
    "length", [["--max_steps=3"], ["--max_steps=-1", "--num_train_epochs=0.4"]]
)
def test_resuming_a_finished_run_trains_no_further(options, tmp_path, length):
    more = [*length, "--save_strategy=steps", "--save_steps=2"]
    folder = run(options, tmp_path / "run", *more)
    finished = weights(folder)
    last = max(json.loads(x)["step"] for x in (folder / "log.jsonl").read_text().splitlines())
    (folder / "model.safetensors").unlink()
    again = run(options, folder, *more, "--resume_from_checkpoint=true")
    assert_same_weights(finished, weights(again), atol=0, rtol=0)
    steps = [json.loads(x)["step"] for x in (again / "log.jsonl").read_text().splitlines()]
    assert max(steps) == last


def test_resume_skips_a_checkpoint_whose_saving_was_killed(options, tmp_path, monkeypatch, capsys):
    more = ["--save_strategy=steps", "--save_steps=1", "--save_total_limit=5"]
    straight = run(options, tmp_path / "straight", *more)
    save_optimizer = MarsTrainer._save_optimizer_and_scheduler

    def kill_at_step_3(self, output_dir):
        if output_dir.endswith("checkpoint-3"):
            raise KeyboardInterrupt
        save_optimizer(self, output_dir)

    folder = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(MarsTrainer, "_save_optimizer_and_scheduler", kill_at_step_3)
        with pytest.raises(KeyboardInterrupt):
            run(options, folder, *more)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # the line that was being written
    capsys.readouterr()
    run(options, folder, *more, "--resume_from_checkpoint=true")
    assert "checkpoint-3 was not saved completely" in capsys.readouterr().err
    assert_same_weights(weights(straight), weights(folder), atol=0, rtol=0)
    assert [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]


def test_an_interrupted_final_save_is_no_model(options, tmp_path, monkeypatch):
    more = ["--save_strategy=steps", "--save_steps=3"]

    def interrupt(self, output_dir=None, state_dict=None):
        save_files(self, output_dir, state_dict)
        if "checkpoint-" not in str(output_dir):
            raise KeyboardInterrupt

    save_files = MarsTrainer._save
    with monkeypatch.context() as patch:
        patch.setattr(MarsTrainer, "_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(options, tmp_path / "run", *more)
    with pytest.raises(UserError):
        load(tmp_path / "run")
    folder = run(options, tmp_path / "run", *more, "--resume_from_checkpoint=true")
    assert_same_weights(weights(folder), weights(folder / "checkpoint-3"), atol=0, rtol=0)
    assert not (folder / PARTIAL).exists()


@pytest.mark.parametrize(
    "nothing",
    [
        ["--max_steps=-1", "--num_train_epochs=0"],
        ["--max_steps=0"],
        ["--per_device_train_batch_size=64", "--dataloader_drop_last=true"],
    ],
)
def test_a_run_without_a_step_is_refused(options, tmp_path, nothing):
    with pytest.raises(UserError, match="no optimiser step"):
        run(options, tmp_path / "run", *nothing)
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    "option",
    [
        "--report_to=foo",
        "--report_to=clearml",
        "--adam_beta1=2",
        "--lr_scheduler_type=cosine_with_min_lr",
    ],
)
def test_options_that_the_trainer_refuses(options, tmp_path, option):
    with pytest.raises(UserError):
        run(options, tmp_path / "run", option)


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


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("adds_row", [False, True], ids=["spare", "row"])
def test_lora_folder_is_the_trained_model(
    options, tmp_path, tiny_checkpoint, monkeypatch, is_tied, adds_row
):
    base = tiny_checkpoint("llama", tie_word_embeddings=is_tied)
    base.mars = None
    base.tokenizer = copy.deepcopy(base.tokenizer)
    if adds_row:  # a template that uses the only spare token
        base.tokenizer.chat_template += "{# <|mask|> #}"
    base.save(tmp_path / "base")
    ids = torch.tensor([[5, 6, 260, 260] if adds_row else [5, 6, 3, 3]])
    trained = {}

    def remember_logits(trainer, model, args):
        with torch.no_grad():
            trained["logits"] = trainer.model.eval()(input_ids=ids).logits
        save(trainer, model, args)

    monkeypatch.setattr(training, "save", remember_logits)
    folder = run(
        *(options, tmp_path / "run", f"--model={tmp_path / 'base'}"),
        *("--method=lora", "--lora_rank=4"),
    )
    checkpoint = load(folder)
    assert checkpoint.mars is not None
    assert checkpoint.mars.adapter == "lora"
    assert checkpoint.mask_token_id == ids[0, -1]
    torch.testing.assert_close(
        checkpoint.model(ids).logits, trained["logits"], atol=1e-4, rtol=1e-4
    )
    if not adds_row:
        before = load(tmp_path / "base").model(ids).logits
        assert (before - trained["logits"]).abs().max() > 0.1
    checkpoint.save(tmp_path / "merged")
    again = load(tmp_path / "merged")
    torch.testing.assert_close(again.model(ids).logits, checkpoint.model(ids).logits)
    with pytest.raises(UserError, match="mars merge"):
        run(options, tmp_path / "second", f"--model={folder}", "--method=lora")


def test_lora_of_a_plain_model(options, tmp_path, tiny_folder):
    folder = run(options, tmp_path / "run", "--method=lora", "--masked_weight=0")
    ids = torch.tensor([[5, 6, 7, 8]])
    checkpoint = load(folder)
    assert checkpoint.mars is None
    difference = checkpoint.model(ids).logits - load(tiny_folder).model(ids).logits
    assert difference.abs().max() > 0.1


def test_mask_id_outside_the_vocabulary(options, tmp_path):
    with pytest.raises(UserError, match="vocabulary of 260"):
        run(options, tmp_path / "run", "--mask_token_id=260")


def test_probe_cannot_swallow_the_data(options, tmp_path):
    with pytest.raises(UserError, match="probe_size"):
        run(options, tmp_path / "run", "--probe_size=40")


@pytest.mark.parametrize(
    ("block_size", "phases"), [(0, [0]), (1, [0]), (4, [0, 1, 2, 3]), (40, None)]
)
def test_the_cost_of_a_probe_is_bounded(block_size, phases, monkeypatch):
    seen = []

    def record(self, batch, phase):
        seen.append(phase)
        return torch.ones(3, 1 + block_size)

    monkeypatch.setattr(Probe, "_sums", record)
    checkpoint = SimpleNamespace(model=SimpleNamespace(device="cpu"))
    Probe(checkpoint, [None], lambda rows: {}, block_size, nullcontext).measure_likelihood()
    assert seen == (phases or [i * 40 // 16 for i in range(16)])
    assert len(set(seen)) == len(seen) <= 16
