"""GSM8K test questions: likelihood, accuracy per offset, TPF and speed against `transformers`.

    python benchmarks/gsm8k.py MODEL --data gsm8k_test.jsonl [--questions 100] [--json FILE]

The questions are split into groups; within each group every way of decoding runs once, so that
noise of the machine hits all of them, and ratios are medians over the groups.
"""

import argparse
import contextlib
import json
import re
import statistics

from ways import Tally, measure_decoding, median_ratio, ours, theirs

from mars import load
from mars.checkpoint import Checkpoint
from mars.data import Collator, build_examples
from mars.evaluation.environment import describe_environment
from mars.training.probe import Probe


def last_number(text: str) -> str | None:
    """Return the answer of a worked solution: the number after ####, else the last number."""
    marked = text.split("####")[-1]
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", marked)
    return numbers[0 if "####" in text else -1].replace(",", "").rstrip(".") if numbers else None


def measure_likelihood(checkpoint: Checkpoint, records: list[dict]) -> dict[str, float]:
    """Clean NLL and accuracy per offset against the worked solutions."""
    examples, _ = build_examples(
        records, checkpoint.tokenizer, max_length=1024, eos_token_ids=checkpoint.eos_token_ids
    )
    block_size = checkpoint.mars.block_size if checkpoint.mars else 0
    probe = Probe(
        checkpoint, examples, Collator(pad_token_id=0), block_size, contextlib.nullcontext
    )
    return probe.measure_likelihood()


def summarise(tallies: dict[str, Tally], gold: list[str | None], groups: int) -> list[dict]:
    """One row per way of decoding; ratios to our AR mode and to `transformers`."""
    order = [i for group in range(groups) for i in range(group, len(gold), groups)]
    rows = []
    for name, tally in tallies.items():
        right = sum(last_number(a) == gold[i] for a, i in zip(tally.answers, order, strict=True))
        equal = zip(tally.token_ids, tallies["ar"].token_ids, strict=True)
        rows.append(
            {
                "way": name,
                "tokens_per_s": round(statistics.median(tally.speed), 2),
                "ratio_to_ar": round(median_ratio(tally.speed, tallies["ar"].speed), 3),
                "ratio_to_transformers": round(
                    median_ratio(tally.speed, tallies["transformers"].speed), 3
                ),
                "tokens_per_forward": round(sum(tally.tokens) / tally.forwards, 3)
                if tally.forwards
                else None,
                "accuracy": right / len(gold),
                "same_as_ar": sum(a == b for a, b in equal) / len(gold),
            }
        )
    return rows


def decode_all_ways(
    checkpoint: Checkpoint, records: list[dict], args: argparse.Namespace
) -> list[dict]:
    """Decode the questions with `transformers`, our AR mode and every threshold."""
    settings = (checkpoint, args.batch_size, args.max_new_tokens)
    ways = {"transformers": theirs(*settings), "ar": ours(*settings, mode="ar")}
    if checkpoint.mars is not None:
        for tau in args.thresholds:
            ways[f"threshold {tau}"] = ours(
                *settings, mode="threshold", threshold=tau, window=args.window
            )
    gold = [last_number(record["answer"]) for record in records]
    tallies = measure_decoding(ways, [record["question"] for record in records], args.groups)
    return summarise(tallies, gold, args.groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="hub id or folder; the default model if left out")
    parser.add_argument("--data", required=True)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--thresholds", type=float, nargs="*", default=[0.95, 0.9, 0.7, 0.5])
    parser.add_argument("--window", type=int, help="the trained block size if left out")
    parser.add_argument("--likelihood-only", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()

    with open(args.data) as file:
        records = [json.loads(line) for line in file][: args.questions]
    checkpoint = load(args.model, dtype=args.dtype)
    report = {"environment": describe_environment(), "arguments": vars(args)}
    report["likelihood"] = measure_likelihood(checkpoint, records)
    if not args.likelihood_only:
        report["decoding"] = decode_all_ways(checkpoint, records, args)
    text = json.dumps(report, indent=2)
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
