"""One decoding forward with masks: our gated LoRA, PEFT's activated LoRA, and no adapter.

    python benchmarks/alora.py [--rows 1] [--real 5] [--masks 20] [--rank 14]

All in bfloat16 through the stock forward, linear layers by our kernel where there is one. The three
take turns; medians, and ratios to no adapter. (The engine's own decoder, which runs models of the
Llama kind, adds the LoRA to the sums of its layers, and takes no part here.)
"""

import argparse
import json
import statistics
import time

import torch
from peft import LoraConfig, get_peft_model

from mars import load
from mars.engine.kernels.linear import PackedLinears
from mars.evaluation.environment import describe_environment
from mars.gated import GatedAdapter, GatedConfig, all_linear, mask_columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--real", type=int, default=5)
    parser.add_argument("--masks", type=int, default=20)
    parser.add_argument("--rank", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    columns = args.real + args.masks
    ids = torch.randint(20, 1000, (args.rows, columns))
    plain, ours, theirs = (load(adapter=None, dtype="bfloat16").model for _ in range(3))
    config = GatedConfig(
        base=None,
        fingerprint="",
        block_size=args.masks,
        rank=args.rank,
        targets=all_linear(ours),
        mask_embeddings=1,
    )
    adapter = GatedAdapter(ours, config).to(torch.bfloat16).requires_grad_(False)
    peft = get_peft_model(
        theirs,
        LoraConfig(
            r=args.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            alora_invocation_tokens=[1],
        ),
        autocast_adapter_dtype=False,
    ).to(torch.bfloat16)
    offset_BM = torch.zeros(args.rows, args.masks, dtype=torch.long)

    packed = {
        "none": PackedLinears(plain),
        "ours": PackedLinears(ours, adapter),
        "peft": PackedLinears(peft),
    }

    def run_ours() -> None:
        with mask_columns(ours, args.real, offset_BM):
            ours(ids, use_cache=False)

    ways = {
        "none": lambda: plain(ids, use_cache=False),
        "ours": run_ours,
        "peft": lambda: peft(
            input_ids=ids, use_cache=False, alora_offsets=[args.masks] * args.rows
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for repeat in range(args.repeats + 2):
            for name, run in ways.items():
                started = time.perf_counter()
                with packed[name]:
                    run()
                if repeat >= 2:  # the first are warm-up
                    seconds[name].append(time.perf_counter() - started)
    rows = {
        name: {
            "ms": round(1000 * statistics.median(times), 2),
            "ratio": round(
                statistics.median(a / b for a, b in zip(times, seconds["none"], strict=True)), 3
            ),
        }
        for name, times in seconds.items()
    }
    print(json.dumps({"environment": describe_environment(), "arguments": vars(args), **rows}))


if __name__ == "__main__":
    main()
