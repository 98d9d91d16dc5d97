"""Peak memory of one training step: chunked losses against logits for all positions at once.

    python benchmarks/training_memory.py [--rows 4] [--length 512]

Each variant runs in a process of its own, on random tokens; the figure is the process's peak
resident set above what it had after loading the model.
"""

import argparse
import json
import multiprocessing
import resource

import torch

from mars import load
from mars.checkpoint import prepare_for_training
from mars.evaluation.environment import describe_environment
from mars.masks import dense_mask
from mars.objective import Objective
from mars.streams import IGNORE, Streams
from mars.training.forward import run_streams
from mars.training.trainer import training_streams

MEBIBYTE = 1 << 20


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def naive_loss(model: torch.nn.Module, streams: Streams) -> torch.Tensor:
    """Cross-entropy over the logits of both streams, all of them at once, in float32."""
    logits = model(
        input_ids=streams.input_ids,
        attention_mask=dense_mask(streams),
        position_ids=streams.position_ids,
        use_cache=False,
    ).logits.float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), streams.target.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def measure(variant: str, rows: int, length: int, queue: "multiprocessing.Queue") -> None:
    checkpoint = load(adapter=None, dtype="float32")
    prepare_for_training(checkpoint, block_size=4, adapter="full")
    model = checkpoint.model.train()
    ids = torch.randint(20, 40_000, (rows, length))
    labels = ids.clone()
    labels[:, : length // 2] = IGNORE
    batch = {
        "input_ids": ids,
        "labels": labels,
        "document_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(length).expand_as(ids),
        "example_ids": torch.zeros_like(ids),
    }
    streams = training_streams(
        batch, block_size=4, mask_token_id=checkpoint.mask_token_id, seed=0, step=0
    )
    before = peak_bytes()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if variant == "chunked":
            loss = run_streams(model, streams, Objective(), block_size=4).loss
        else:
            loss = naive_loss(model, streams)
    loss.backward()
    queue.put((peak_bytes() - before, streams.input_ids.numel() * model.config.vocab_size * 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    report: dict[str, object] = {"environment": describe_environment(), "arguments": vars(args)}
    for variant in ("chunked", "all at once"):
        queue = context.Queue()
        process = context.Process(target=measure, args=(variant, args.rows, args.length, queue))
        process.start()
        peak, logits = queue.get()
        process.join()
        report[f"{variant}: peak MiB above the loaded model"] = round(peak / MEBIBYTE)
        report["float32 logits of both streams, MiB"] = round(logits / MEBIBYTE)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
