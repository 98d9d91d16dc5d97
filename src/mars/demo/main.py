"""Train the default model for a few minutes, then compare both modes on prompts it has not seen.

The training set are 360 prompts written for this project with the answers that the default model
itself gives (greedily): the model learns to say what it says anyway, several tokens at a time.
"""

import json
import shutil
import textwrap
import time
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from mars.checkpoint import Checkpoint, load, prepare_for_training
from mars.data import Collator
from mars.decoding.generate import generate
from mars.decoding.options import DecodingOptions
from mars.decoding.request import Result
from mars.default_model import cache_folder
from mars.errors import UserError
from mars.evaluation.agreement import agreement
from mars.evaluation.environment import describe_environment
from mars.training.arguments import MarsArguments, parse_arguments
from mars.training.forward import run_streams
from mars.training.run import load_examples, train, training_rows
from mars.training.trainer import training_streams

MOST_STEPS = 200
FEWEST_STEPS = 10
PROBES_IN_STEPS = 10  # what the measurements before and after cost, in training steps
BATCH_ROWS = 4
OVERHEAD = 1.15  # a step is also an optimiser update, and not every one is the fastest
MAX_NEW_TOKENS = 128
OTHER_THRESHOLDS = (0.9, 0.5)
COLUMN = 56


def demo(
    *,
    model: str | None = None,
    train_minutes: float = 8.0,
    threshold: float | None = 0.7,
    output: Path | None = None,
) -> None:
    """Train for `train_minutes`, then decode unseen prompts in both modes and print the difference.

    Args:
        model: hub id or folder; the default model if None.
        train_minutes: time for the training, estimated from a few steps measured first.
        threshold: tau of the multi-token mode.
        output: where the checkpoint goes; a folder in the cache if None.
    """
    options = DecodingOptions(threshold=threshold, max_new_tokens=MAX_NEW_TOKENS)
    folder = _output_folder(output)
    print("MARS demo.", *(f"{k}: {v}" for k, v in describe_environment().items()), sep="  ")
    args, seconds = plan_training(model, folder, train_minutes)
    print(
        f"\n1. Training: {args.max_steps} steps of {BATCH_ROWS} rows, about "
        f"{seconds / 60:.1f} minutes.\n",
        flush=True,
    )
    train(args)
    checkpoint = load(folder, dtype="bfloat16" if args.bf16 else "float32")
    print("\n2. The same weights, one token per forward (left) and several (right):")
    print(summary(compare(checkpoint, _prompts(), options)))
    print("\n3. " + check_plain_loading(folder, _prompts()[0]))
    print(f"\nTalk to it:  mars chat --model {folder}")


def _output_folder(output: Path | None) -> Path:
    """Return an empty folder; only the demo's own may be replaced."""
    if output is None:
        folder = cache_folder() / "demo"
        shutil.rmtree(folder, ignore_errors=True)
        return folder
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty. Choose another --output.")
    return output


def _prompts() -> list[str]:
    lines = files("mars.demo").joinpath("show_prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def plan_training(model: str | None, folder: Path, minutes: float) -> tuple[MarsArguments, float]:
    """Choose precision and number of steps such that training fits into `minutes`.

    Returns:
        The arguments, and the seconds training is expected to take (measurements included).
    """
    options = {
        "model": model,
        "data": str(files("mars.demo").joinpath("train.jsonl")),
        "output_dir": str(folder),
        "max_length": 512,
        "packing": True,
        "per_device_train_batch_size": BATCH_ROWS,
        # Two masks: with minutes of training, the first offsets are what can be learned.
        "block_size": 2,
        "learning_rate": 4e-4,
        "warmup_steps": 0.05,
        "probe_size": 16,
        "probe_steps": 2 * MOST_STEPS,  # so: at the start and at the end
        "save_strategy": "no",
        "logging_steps": 5,
    }
    small = {
        is_bfloat16: seconds_per_step(parse_arguments([], bf16=is_bfloat16, **options), num_rows=1)
        for is_bfloat16 in (True, False)
    }
    is_bfloat16 = small[True] <= small[False]
    args = parse_arguments([], bf16=is_bfloat16, **options)
    step = OVERHEAD * seconds_per_step(args, num_rows=BATCH_ROWS)
    steps = int(60 * minutes / step) - PROBES_IN_STEPS
    steps = min(MOST_STEPS, max(FEWEST_STEPS, steps))
    args = parse_arguments([], bf16=is_bfloat16, max_steps=steps, **options)
    return args, step * (steps + PROBES_IN_STEPS)


def seconds_per_step(args: MarsArguments, *, num_rows: int) -> float:
    """Time forward and backward of a typical batch: the fastest of three, after a warm-up."""
    checkpoint = load(args.model, dtype="float32")
    prepare_for_training(checkpoint, block_size=args.block_size, adapter="full")
    model, device = checkpoint.model, checkpoint.model.device
    rows = training_rows(load_examples(args, checkpoint)[0], args)
    batch = Collator(pad_token_id=0)(rows[:num_rows])
    streams = training_streams(
        {name: tensor.to(device) for name, tensor in batch.items()},
        block_size=args.block_size,
        mask_token_id=checkpoint.mask_token_id,
        seed=0,
        step=0,
    )
    elapsed = []
    for _ in range(4):
        started = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
            sums = run_streams(model, streams, args.objective, block_size=args.block_size)
        sums.loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed.append(time.perf_counter() - started)
    return min(elapsed[1:])


def compare(
    checkpoint: Checkpoint, prompts: list[str], options: DecodingOptions
) -> dict[str, list[Result]]:
    """Decode each prompt in every way, one after the other; print two of them in columns.

    Returns:
        The answers by `ar`, by the threshold of `options`, and by others for the table.
    """
    generate(checkpoint, prompts[0], options, max_new_tokens=8)  # warm-up
    shown = f"threshold {options.threshold}"
    ways: dict[str, dict[str, Any]] = {"ar": {"mode": "ar"}, shown: {}}
    ways |= {f"threshold {tau}": {"threshold": tau} for tau in OTHER_THRESHOLDS}
    answers: dict[str, list[Result]] = {way: [] for way in ways}
    for prompt in prompts:
        for way, overrides in ways.items():
            answers[way].append(generate(checkpoint, prompt, options, **overrides))
        one, several = answers["ar"][-1], answers[shown][-1]
        print(f"\n> {prompt}")
        print(two_columns(_label("ar", one), _label(shown, several)))
        print(two_columns(one.text, several.text), flush=True)
    return answers


def _label(mode: str, result: Result) -> str:
    speed = len(result.token_ids) / result.seconds
    return f"[{mode}: {speed:.0f} tokens/s, {result.tokens_per_forward:.2f} tokens per forward]"


def two_columns(left: str, right: str) -> str:
    """Set two texts side by side."""

    def wrap(text: str) -> list[str]:
        lines = [textwrap.wrap(line, COLUMN) or [""] for line in text.splitlines()]
        return [part for line in lines for part in line]

    pairs = zip_longest(wrap(left), wrap(right), fillvalue="")
    return "\n".join(f"{a:<{COLUMN}} | {b}" for a, b in pairs)


def summary(answers: dict[str, list[Result]]) -> str:
    """Tabulate speed, and what changed in the text against `ar`."""
    lines = [
        f"\n{'':<16}{'tokens/s':>10}{'TPF':>7}{'ratio':>8}{'same answers':>15}{'same start':>13}"
    ]
    reference = answers["ar"]
    for way, results in answers.items():
        tokens = sum(len(r.token_ids) for r in results)
        speed = tokens / sum(r.seconds for r in results)
        ratio = speed / (
            sum(len(r.token_ids) for r in reference) / sum(r.seconds for r in reference)
        )
        start, same = agreement([r.token_ids for r in results], [r.token_ids for r in reference])
        per_forward = tokens / sum(r.forwards for r in results)
        lines.append(
            f"{way:<16}{speed:>10.1f}{per_forward:>7.2f}{ratio:>7.2f}x{same:>15.0%}{start:>13.0%}"
        )
    lines.append(
        "Threshold mode trades text for speed. same answers: share equal to ar to the last token; "
        "same start: share of tokens before the first difference."
    )
    return "\n".join(lines)


def check_plain_loading(folder: Path, prompt: str) -> str:
    """Load the checkpoint as `transformers` does, without this package, and compare the AR text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = generate(
        load(folder, dtype="float32", device="cpu"), prompt, mode="ar", max_new_tokens=32
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    theirs = output[0, inputs["input_ids"].shape[1] :].tolist()
    verdict = "the same tokens as" if ours.token_ids == theirs else "OTHER TOKENS THAN"
    return (
        f"The checkpoint loads as the plain AR model it was: AutoModelForCausalLM.generate says "
        f"{verdict} our ar mode (float32, {len(theirs)} tokens)."
    )
