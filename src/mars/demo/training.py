"""How much training fits into some minutes on this machine."""

import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from mars.data import Collator
from mars.training.arguments import MarsArguments, parse_arguments
from mars.training.gated import random_anchors, run_gated
from mars.training.run import load_examples, load_gated_base, training_rows

MOST_STEPS = 400
FEWEST_STEPS = 10
PROBES_IN_STEPS = 6  # what the measurements before and after cost, in training steps
BATCH_ROWS = 4
OVERHEAD = 1.15  # a step is also an optimiser update, and not every one is the fastest


def plan_training(model: str | None, folder: Path, minutes: float) -> tuple[MarsArguments, float]:
    """Choose precision and number of steps such that training fits into `minutes`.

    Returns:
        The arguments, and the seconds training is expected to take (measurements included).
    """
    options = {
        "method": "gated",
        "model": model,
        "data": str(files("mars.demo").joinpath("train.jsonl")),
        "output_dir": str(folder),
        "max_length": 512,
        "per_device_train_batch_size": BATCH_ROWS,
        "warmup_steps": 0.05,
        "probe_size": 16,
        "probe_steps": 2 * MOST_STEPS,  # so: at the start and at the end
        "save_strategy": "no",
        "logging_steps": 10,
    }
    seconds = {
        is_bfloat16: seconds_per_step(parse_arguments([], bf16=is_bfloat16, **options))
        for is_bfloat16 in (True, False)
    }
    is_bfloat16 = seconds[True] <= seconds[False]
    step = OVERHEAD * seconds[is_bfloat16]
    steps = int(60 * minutes / step) - PROBES_IN_STEPS
    steps = min(MOST_STEPS, max(FEWEST_STEPS, steps))
    args = parse_arguments([], bf16=is_bfloat16, max_steps=steps, **options)
    return args, step * (steps + PROBES_IN_STEPS)


def seconds_per_step(args: MarsArguments) -> float:
    """Time forward and backward of a typical batch: the fastest of three, after a warm-up."""
    checkpoint = load_gated_base(args)
    model, adapter = checkpoint.model, checkpoint.adapter
    assert adapter is not None
    rows: Any = training_rows(load_examples(args, checkpoint)[0], args)
    batch = Collator(pad_token_id=0)(rows[:BATCH_ROWS])
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    anchors = random_anchors(
        batch, block_size=args.block_size, num_anchors=args.anchors, seed=0, step=0
    )
    elapsed = []
    for _ in range(4):
        started = time.perf_counter()
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=args.bf16):
            sums = run_gated(model, adapter, batch, anchors, args.draft_objective)
        sums.loss.backward()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        elapsed.append(time.perf_counter() - started)
    return min(elapsed[1:])
