"""Decode prompts in the AR and in the exact mode: the same text, in fewer forwards.

With the adapter that comes with the package, or with one trained here in a few minutes. Its
training set are 360 prompts written for this project with the answers that the default model
itself gives (greedily); the prompts of the comparison are not among them.
"""

import json
import shutil
import time
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from mars.checkpoint import Checkpoint, load
from mars.decoding.generate import generate
from mars.decoding.request import Result
from mars.default_model import cache_folder, ensure_default_model
from mars.demo.training import plan_training
from mars.errors import UserError
from mars.evaluation.agreement import agreement
from mars.evaluation.environment import describe_environment
from mars.gated import is_adapter_folder, read_config
from mars.training.run import train

MAX_NEW_TOKENS = 80
MOST_SECONDS = 100  # of decoding: a slow machine sees fewer prompts
PLAIN_TOKENS = 32
WAYS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "exact": {"mode": "exact"},
    "exact without n-grams": {"mode": "exact", "ngram": False},
}


def demo(
    *,
    model: str | None = None,
    adapter: str | Path | None = "auto",
    train_minutes: float | None = None,
    output: Path | None = None,
) -> None:
    """Decode unseen prompts one token per forward and several, and print the difference.

    Args:
        model: hub id or folder; the default model if None.
        adapter: as for `load`.
        train_minutes: first train an adapter for about this time; None: use `adapter`.
        output: where that adapter goes; a folder in the cache if None.

    Raises:
        UserError: there is no adapter, or the output folder is not empty.
    """
    logging.disable_progress_bar()  # of loading, four times
    folder = None if train_minutes is None else _output_folder(model, output)
    print("MARS demo.", *(f"{k}: {v}" for k, v in describe_environment().items()), sep="  ")
    if folder is not None:
        train_adapter(model, folder, train_minutes or 0.0)
        adapter = folder
    checkpoint = load_drafting(model, adapter)
    print(f"\nOne token per forward, and several ({checkpoint.model.dtype}):")
    print(summary(compare(checkpoint, prompts(), max_seconds=MOST_SECONDS)))
    print("\n" + check_plain_loading(model, adapter, prompts()[0]))
    print("\n" + hint(model, adapter, is_trained=folder is not None))


def prompts() -> list[str]:
    """Return the prompts of the comparison."""
    lines = files("mars.demo").joinpath("show_prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def _output_folder(model: str | None, output: Path | None) -> Path:
    """Return an empty folder; only the demo's own may be replaced."""
    if model is not None and is_adapter_folder(model):
        raise UserError(f"{model} is a gated adapter; this training starts from a base model.")
    if output is None:
        folder = cache_folder() / "demo"
        shutil.rmtree(folder, ignore_errors=True)
        return folder
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not an empty folder. Choose another --output.")
    return output


def train_adapter(model: str | None, folder: Path, minutes: float) -> None:
    """Train for about `minutes`, and print what the masks have learned."""
    args, seconds = plan_training(model, folder, minutes)
    print(
        f"\nTraining an adapter: {args.max_steps} steps of {args.per_device_train_batch_size} "
        f"answers, about {seconds / 60:.1f} minutes.",
        flush=True,
    )
    train(args)
    lines = (folder / "log.jsonl").read_text().splitlines()
    probes = [entry for entry in map(json.loads, lines) if "probe_tokens_per_forward" in entry]
    print("\nDrafts equal to the model's own choice, on answers not trained on:")
    for when, probe in zip(("before", "after"), (probes[0], probes[-1]), strict=True):
        shares = [f"{v:.0%}" for k, v in probe.items() if k.endswith("_accuracy")]
        print(f"  {when:<8}{'  '.join(shares)}  by offset")


def load_drafting(model: str | None, adapter: str | Path | None) -> Checkpoint:
    """Load the checkpoint and warm it up.

    Raises:
        UserError: there is no adapter for it.
    """
    checkpoint = load(model, adapter=adapter)
    if checkpoint.mars is None:
        name = "the default model in this installation" if model is None else model
        raise UserError(
            f"There is no adapter for {name}. Name one with --adapter, or train one in some "
            "minutes: mars demo --train"
        )
    for options in WAYS.values():
        generate(checkpoint, prompts()[0], max_new_tokens=4, **options)
    return checkpoint


def compare(
    checkpoint: Checkpoint, questions: list[str], *, max_seconds: float
) -> dict[str, list[Result]]:
    """Decode each prompt in every way and print the answer, as many as `max_seconds` allow.

    Returns:
        The answers, by the names of `WAYS`.
    """
    started = time.perf_counter()
    answers: dict[str, list[Result]] = {way: [] for way in WAYS}
    for number, question in enumerate(questions):
        elapsed = time.perf_counter() - started
        if number and elapsed * (number + 1) / number > max_seconds:  # as long as those before
            print(f"\n(Slow or busy machine: {number} of {len(questions)} prompts were asked.)")
            break
        for way, options in WAYS.items():
            result = generate(checkpoint, question, max_new_tokens=MAX_NEW_TOKENS, **options)
            answers[way].append(result)
        print(f"\n> {question}\n" + show(answers["ar"][-1], answers["exact"][-1]), flush=True)
    return answers


def show(ar: Result, exact: Result) -> str:
    """Return the answer once, with the figures of both modes; twice where they differ."""
    figures = [
        f"[{name}: {len(result.token_ids) / result.seconds:.0f} tokens/s, "
        f"{result.tokens_per_forward:.2f} tokens per forward]"
        for name, result in (("ar", ar), ("exact", exact))
    ]
    if ar.token_ids == exact.token_ids:
        return "\n".join([*figures, ar.text])
    pairs = zip_longest(ar.token_ids, exact.token_ids)
    place = next(i for i, (a, e) in enumerate(pairs, start=1) if a != e)
    return "\n".join(
        [figures[0], ar.text, figures[1], exact.text, f"(They part at token {place}.)"]
    )


def summary(answers: dict[str, list[Result]]) -> str:
    """Tabulate speed, and how many answers are those of `ar`."""
    lines = [f"\n{'':<23}{'tokens/s':>10}{'TPF':>7}{'ratio':>8}{'same answers':>15}"]
    reference, baseline = [result.token_ids for result in answers["ar"]], None
    is_same = True
    for way, results in answers.items():
        tokens = sum(len(result.token_ids) for result in results)
        speed = tokens / sum(result.seconds for result in results)
        baseline = baseline or speed
        per_forward = tokens / sum(result.forwards for result in results)
        _, same = agreement([result.token_ids for result in results], reference)
        is_same &= same == 1
        lines.append(
            f"{way:<23}{speed:>10.1f}{per_forward:>7.2f}{speed / baseline:>7.2f}x{same:>15.0%}"
        )
    if not is_same:
        lines.append(
            "In half precision, forwards of different widths round differently, and a near-tie may "
            "fall otherwise: see docs/exactness.md. In float32 no answer differs."
        )
    return "\n".join(lines)


def check_plain_loading(model: str | None, adapter: str | Path | None, question: str) -> str:
    """Load the base as `transformers` does, without this package, and compare with `exact`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = generate(
        load(model, adapter=adapter, dtype="float32", device="cpu"),
        question,
        max_new_tokens=PLAIN_TOKENS,
    )
    if model is not None and is_adapter_folder(model):
        model = read_config(model).base
    folder = ensure_default_model() if model is None else model
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = plain.generate(**inputs, max_new_tokens=PLAIN_TOKENS, do_sample=False)
    theirs = output[0, inputs["input_ids"].shape[1] :].tolist()
    verdict = "the same tokens as" if ours.token_ids == theirs else "OTHER TOKENS THAN"
    return (
        "The model itself is unchanged, the adapter lies beside it: loaded by transformers alone, "
        f"its greedy generate says {verdict} our exact mode (float32, {len(theirs)} tokens)."
    )


def hint(model: str | None, adapter: str | Path | None, *, is_trained: bool) -> str:
    """Say what to do next."""
    flags = "" if model is None else f" --model {model}"
    flags += "" if adapter in ("auto", None) else f" --adapter {adapter}"
    lines = [f"Talk to it:          mars chat{flags}"]
    if not is_trained:
        lines.append("Train an adapter:    mars demo --train   (some minutes)")
    lines.append("Train one for good:  mars distill, then mars train --method gated (README.md)")
    return "\n".join(lines)
