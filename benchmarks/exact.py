"""Exact mode against ar on prompts that no adapter was trained on: TPF, equality, speed.

    python benchmarks/exact.py DATA [--model M] [--adapter A] [--ways ar full partial ...]

DATA holds gsm8k_test.jsonl, HumanEval.jsonl.gz and user_oriented_instructions.jsonl (the last 60
are used). The prompts of each set are split into groups; within a group every way runs once, so
that noise of the machine hits all of them, and ratios are medians over the groups.
"""

import argparse
import json
import statistics
from pathlib import Path

from prompts import read_prompts, spread
from ways import Tally, measure_decoding, median_ratio, ours, theirs

from mars import load
from mars.evaluation.agreement import agreement
from mars.evaluation.drafts import acceptance_by_offset, calibration_error
from mars.evaluation.environment import describe_environment

# Options of each way; those of `transformers` start with hf.
WAYS = {
    "hf": {},
    "hf-lookup": {"prompt_lookup_num_tokens": 8},
    "ar": {"mode": "ar"},
    "auto": {},
    "full": {"layout": "full"},
    "full-no-ngram": {"layout": "full", "ngram": False},
    "partial": {"layout": "partial"},
    "partial-no-ngram": {"layout": "partial", "ngram": False},
    "linear": {"layout": "linear"},
    "linear-no-ngram": {"layout": "linear", "ngram": False},
    "ngram-only": {"window": 0},
}


def summarise(tallies: dict[str, Tally]) -> list[dict]:
    """One row per way; ratios to `ar`."""
    reference = tallies["ar"]
    rows = []
    for name, tally in tallies.items():
        start, same = agreement(tally.token_ids, reference.token_ids)
        rows.append(
            {
                "way": name,
                "tokens_per_s": round(statistics.median(tally.speed), 2),
                "ratio_to_ar": round(median_ratio(tally.speed, reference.speed), 3),
                "tokens_per_forward": round(sum(tally.tokens) / tally.forwards, 3)
                if tally.forwards
                else None,
                "tokens": sum(tally.tokens),
                "same_as_ar": round(same, 4),
                "same_start": round(start, 4),
                "acceptance": [round(a, 3) for a in acceptance_by_offset(tally.outcomes)],
                "calibration_error": round(calibration_error(tally.outcomes), 4),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", help="hub id or folder; the default model if left out")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--sets", nargs="*", default=["gsm8k", "humaneval", "chat"])
    parser.add_argument("--prompts", type=int, default=40, help="of each set, evenly spread")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--window", type=int, help="the trained block size if left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ways", nargs="*", default=["ar", "full", "partial"], choices=list(WAYS))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    checkpoint = load(args.model, adapter=args.adapter, dtype=args.dtype)
    report = {"environment": describe_environment(), "arguments": vars(args), "sets": {}}
    settings = (checkpoint, args.batch_size, args.max_new_tokens)
    for name, prompts in read_prompts(args.data).items():
        if name not in args.sets:
            continue
        chosen = spread(prompts, min(args.prompts, len(prompts)))
        ways = {}
        for way in args.ways:
            options = dict(WAYS[way])
            if way.startswith("hf"):
                ways[way] = theirs(*settings, **options)
                continue
            if "window" not in options and way != "ar":
                options["window"] = args.window
            ways[way] = ours(*settings, temperature=args.temperature, **options)
        rows = summarise(measure_decoding(ways, chosen, args.groups))
        report["sets"][name] = rows
        for row in rows:
            print(name, *(f"{key}={value}" for key, value in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
