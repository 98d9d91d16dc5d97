"""Training of the gated adapter: rows equal decoding steps, updates do not depend on the how."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mars.checkpoint import load
from mars.decoding.plan import RowPlan
from mars.draft_objective import DraftObjective
from mars.engine.runner import Runner
from mars.errors import UserError
from mars.gated import CONFIG_FILE, WEIGHTS_FILE, GatedAdapter, GatedConfig, all_linear, fingerprint
from mars.streams import IGNORE
from mars.training.arguments import parse_arguments
from mars.training.gated import choose_anchors, random_anchors, run_gated
from mars.training.run import train
from tests.conftest import FAMILIES, make_model

BLOCK = 3


def packed_batch(seed: int = 0):
    """Two rows: one document with two answers; two documents and padding."""
    torch.manual_seed(seed)
    length = 14
    document = torch.tensor([[0] * length, [0] * 6 + [1] * 6 + [-1] * 2])
    position = torch.stack(
        [torch.arange(length), torch.cat([torch.arange(6), torch.arange(6), torch.zeros(2).long()])]
    )
    supervised = torch.zeros(2, length, dtype=torch.bool)
    supervised[0, 3:8] = supervised[0, 10:] = True
    supervised[1, 2:6] = supervised[1, 8:12] = True
    input_ids = torch.randint(4, 260, (2, length))
    return {
        "input_ids": input_ids,
        "labels": torch.where(supervised, input_ids, IGNORE),
        "document_ids": document,
        "position_ids": position,
        "example_ids": document,
    }


def make_adapter(model, **changes):
    torch.manual_seed(5)
    entries = {
        "base": None,
        "fingerprint": fingerprint(model),
        "block_size": BLOCK,
        "rank": 4,
        "targets": all_linear(model),
        "mask_embeddings": BLOCK,
    }
    adapter = GatedAdapter(model, GatedConfig(**(entries | changes)))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return adapter


def decoding_step(model, tokens):
    """Return the logits of the masks behind these tokens."""
    runner = Runner(model, num_rows=1, max_positions=64)
    runner.add_row()
    return runner.forward(0, [tokens], [RowPlan(groups=(0,), window=BLOCK)])[1][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_in_training_equal_the_decoding_step(family, monkeypatch):
    model = make_model(family)
    adapter = make_adapter(model)
    batch = packed_batch()
    anchors = choose_anchors(batch, torch.arange(28).view(2, 14), block_size=BLOCK, num_anchors=14)
    seen = {}
    monkeypatch.setattr(
        "mars.training.gated.draft_loss", lambda hidden, *rest, **more: seen.update(hidden=hidden)
    )
    with torch.no_grad():
        run_gated(model, adapter, batch, anchors, DraftObjective())
        logits = model.get_output_embeddings()(seen["hidden"]).view(2, -1, BLOCK, 260)
    compared = 0
    for row, n in torch.nonzero(anchors.is_real_RNJ[..., 0]).tolist():
        start = int(anchors.start_RN[row, n])
        document = batch["document_ids"][row]
        is_prefix = (document == document[start]) & (torch.arange(14) < start)
        expected = decoding_step(model, batch["input_ids"][row][is_prefix].tolist())
        torch.testing.assert_close(logits[row, n], expected, atol=2e-4, rtol=1e-4)
        compared += 1
    assert compared == 4 + 3 + 3 + 3  # every token of an answer but its last


def test_clean_stream_is_the_base_models_and_gets_no_gradient(monkeypatch):
    model = make_model()
    batch = packed_batch()
    single = {name: tensor[:1] for name, tensor in batch.items()}
    expected = model(single["input_ids"]).logits
    adapter = make_adapter(model)
    seen = {}
    monkeypatch.setattr(
        "mars.training.gated.draft_loss",
        lambda hidden, real, clean, *rest, **more: seen.update(clean=clean, hidden=hidden),
    )
    anchors = random_anchors(single, block_size=BLOCK, num_anchors=4, seed=0, step=0)
    run_gated(model, adapter, single, anchors, DraftObjective())
    assert not seen["clean"].requires_grad
    assert seen["hidden"].requires_grad
    logits = model.get_output_embeddings()(seen["clean"])
    torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_width", [0, 6])
def test_every_parameter_gets_a_gradient_and_the_base_none(head_width):
    model = make_model().requires_grad_(False)
    adapter = make_adapter(model, head_width=head_width)
    batch = packed_batch()
    anchors = random_anchors(batch, block_size=BLOCK, num_anchors=6, seed=0, step=0)
    run_gated(model, adapter, batch, anchors, DraftObjective()).loss.backward()
    # Keys and values of the last layer reach other masks of the block; all the rest its output.
    assert all(p.grad is not None and p.grad.any() for p in adapter.parameters())
    assert all(p.grad is None for p in model.parameters())


@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_anchors=st.integers(1, 20), block_size=st.integers(1, 5))
def test_anchors_are_places_of_answers_drawn_once(data, num_anchors, block_size):
    length = 12
    rows = st.lists(st.booleans(), min_size=length, max_size=length)
    supervised = torch.tensor([data.draw(rows), data.draw(rows)])
    document = torch.tensor([[0] * length, [0] * 5 + [1] * 7])
    position = torch.tensor([list(range(length)), [*range(5), *range(7)]])
    batch = {
        "labels": torch.where(supervised, 7, IGNORE),
        "document_ids": document,
        "position_ids": position,
        "example_ids": document,
    }
    anchors = random_anchors(batch, block_size=block_size, num_anchors=num_anchors, seed=1, step=2)
    for row in range(2):
        places = []

        def in_span(index, row=row):
            has_previous = index > 0 and document[row, index] == document[row, index - 1]
            return bool(supervised[row, index]) and bool(has_previous)

        for start, real in zip(
            anchors.start_RN[row].tolist(), anchors.is_real_RNJ[row].tolist(), strict=True
        ):
            expected = []
            for j in range(1, block_size + 1):
                inside = start + j < length and document[row, start + j] == document[row, start]
                alive = expected[-1] if expected else in_span(start)
                expected.append(alive and inside and in_span(start + j))
            assert real == expected
            if real[0]:
                places.append(start)
        eligible = [
            s
            for s in range(length - 1)
            if in_span(s) and in_span(s + 1) and document[row, s] == document[row, s + 1]
        ]
        assert len(places) == len(set(places)) == min(num_anchors, len(eligible))
        assert set(places) <= set(eligible)


def test_anchors_do_not_depend_on_the_batch():
    batch = packed_batch()
    together = random_anchors(batch, block_size=BLOCK, num_anchors=3, seed=4, step=5)
    for row in range(2):
        alone = random_anchors(
            {name: tensor[row : row + 1] for name, tensor in batch.items()},
            block_size=BLOCK,
            num_anchors=3,
            seed=4,
            step=5,
        )
        assert torch.equal(alone.start_RN[0], together.start_RN[row])
    other = random_anchors(batch, block_size=BLOCK, num_anchors=3, seed=4, step=6)
    assert not torch.equal(other.start_RN, together.start_RN)


# The command, end to end.


@pytest.fixture
def gated(options):
    kept = [o for o in options if not o.startswith(("--save_dtype", "--save_strategy"))]
    return [
        *kept,
        *("--method=gated", f"--block_size={BLOCK}", "--lora_rank=4", "--anchors=5"),
        *("--save_strategy=steps", "--save_steps=3", "--seed=7"),
    ]


def run(options, output, *more):
    return train(parse_arguments([*options, f"--output_dir={output}", *more]))


def exact_weights(folder):
    """In float32, as the Trainer keeps them."""
    return load_file(folder / "model.safetensors")


def assert_same(a, b, **close):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **close)


@pytest.mark.parametrize("bf16", [False, True])
def test_trains_an_adapter_that_decodes(gated, tmp_path, tiny_folder, bf16):
    folder = run(gated, tmp_path / "run", "--draft_head=6", f"--bf16={bf16}")
    assert {path.name for path in folder.iterdir()} >= {CONFIG_FILE, WEIGHTS_FILE, "log.jsonl"}
    checkpoint = load(folder)
    assert checkpoint.adapter.config.base == tiny_folder
    assert (checkpoint.mars.block_size, checkpoint.adapter.config.head_width) == (BLOCK, 6)
    logs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    probes = [log for log in logs if "probe_tokens_per_forward" in log]
    assert [log["step"] for log in probes] == [0, 3]
    assert all(log["probe_tokens_per_forward"] >= 1 for log in probes)
    assert all(f"mask{j}_accuracy" in logs[1] for j in range(1, BLOCK + 1))


def test_learns(gated, tmp_path):
    folder = run(gated, tmp_path / "run", "--max_steps=60", "--anchors=12", "--logging_steps=20")
    logs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    # What a random model says cannot be foreseen, but its distribution can be approached.
    probes = [log["probe_mask2_divergence"] for log in logs if "probe_mask2_divergence" in log]
    assert probes[-1] < 0.7 * probes[0]


def test_accumulation_does_not_change_the_update(gated, tmp_path):
    whole = run(gated, tmp_path / "whole")
    parts = run(
        gated,
        tmp_path / "parts",
        *("--per_device_train_batch_size=1", "--gradient_accumulation_steps=4"),
    )
    states = [exact_weights(folder / "checkpoint-3") for folder in (whole, parts)]
    assert_same(*states, atol=2e-5, rtol=1e-4)


def test_two_processes_equal_one(gated, tmp_path):
    one = run(gated, tmp_path / "one")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2"]
    command += ["--mixed_precision=no", "--multi_gpu", "--num_machines=1", "--dynamo_backend=no"]
    command += ["-m", "mars", "train", *gated, f"--output_dir={tmp_path / 'two'}"]
    command += ["--per_device_train_batch_size=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    states = [exact_weights(folder / "checkpoint-3") for folder in (one, tmp_path / "two")]
    assert_same(*states, atol=2e-5, rtol=1e-4)


def test_resume_goes_on_at_the_exact_step(gated, tmp_path):
    more = ["--max_steps=6", "--lr_scheduler_type=cosine"]
    straight = run(gated, tmp_path / "straight", *more)
    stopped = run(gated, tmp_path / "stopped", *more)
    shutil.rmtree(stopped / "checkpoint-6")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (stopped / name).unlink()
    resumed = run(gated, stopped, *more, "--resume_from_checkpoint=true")
    states = [exact_weights(folder / "checkpoint-6") for folder in (straight, resumed)]
    assert_same(*states, atol=0, rtol=0)
    final = [load_file(folder / WEIGHTS_FILE) for folder in (straight, resumed)]
    assert_same(*final, atol=0, rtol=0)


def test_training_goes_on_from_an_adapter(gated, tmp_path):
    first = run(gated, tmp_path / "first")
    more = [option for option in gated if not option.startswith("--model")]
    second = run([*more, f"--model={first}"], tmp_path / "second", "--draft_head=6")
    before, after = load_file(first / WEIGHTS_FILE), load_file(second / WEIGHTS_FILE)
    assert "head.output.weight" in set(after) - set(before)
    name = "model.layers.0.mlp.up_proj.lora_a"
    change = (after[name] - before[name]).abs().max()
    assert 0 < change < 0.1  # three steps of 1e-2 from where it was
    with pytest.raises(UserError, match="rank 4; the options ask for 8"):
        run([*more, f"--model={first}"], tmp_path / "third", "--lora_rank=8")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--clean_weight=0.5"], "clean_weight has no meaning for --method gated"),
        (["--lora_alpha=64"], "lora_alpha has no meaning"),
        (["--method=full", "--weighting=uniform", "--anchors=64"], "weighting has no meaning"),
        (["--offset_decay=2"], "offset_decay needs --weighting decay"),
        (["--lora_targets=nothing"], "no linear layer named 'nothing'"),
        (["--anchors=0"], "anchors must be an integer of at least 1"),
    ],
)
def test_bad_options_are_refused(gated, tmp_path, wrong, message):
    with pytest.raises((UserError, SystemExit), match=message):
        run(gated, tmp_path / "run", *wrong)


def test_a_model_trained_in_another_way_is_refused(gated, tmp_path, tiny_checkpoint):
    tiny_checkpoint("llama").save(tmp_path / "mars")
    with pytest.raises(UserError, match="already trained to predict from masks"):
        run([*gated, f"--model={tmp_path / 'mars'}"], tmp_path / "run")
