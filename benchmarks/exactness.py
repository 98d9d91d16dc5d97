"""Share of answers that are, token for token, those of the reference: which way, which precision.

    python benchmarks/exactness.py DATA OUT.jsonl --dtype float32 --ways full-1 full-8 linear-8 ...
    python benchmarks/exactness.py DATA OUT.jsonl --dtype bfloat16 --ways full-1 full-8

A way is a layout and a batch size, `ar-N` or `hf-N` (stock `transformers` generate). Prompts come
in turn from GSM8K test, HumanEval and the last 60 everyday instructions. Every answer is a line of
OUT; the same command goes on with what is missing. The reference is `hf-1` in float32 and `ar-1`
in bfloat16 and for samples, unless --reference names another.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import torch
from prompts import read_prompts

from mars import load
from mars.checkpoint import Checkpoint
from mars.decoding.generate import prepare
from mars.decoding.loop import decode
from mars.decoding.options import DecodingOptions
from mars.decoding.prompts import encode
from mars.evaluation.environment import describe_environment


def interleave(sets: dict[str, list[str]], count: int) -> list[str]:
    """Take prompts from all sets in turn, as long as each lasts."""
    mixed = [p for group in zip_longest(*sets.values()) for p in group if p is not None]
    return mixed[:count]


def options_of(way: str, args: argparse.Namespace, temperature: float, seed: int) -> dict:
    """Return decoding options of a way such as `full-8`."""
    layout = way.rpartition("-")[0]
    common = {
        "temperature": temperature,
        "seed": seed,
        "max_new_tokens": args.max_new_tokens,
        "top_p": args.top_p,
    }
    return common | ({"mode": "ar"} if layout == "ar" else {"mode": "exact", "layout": layout})


def answers(
    checkpoint: Checkpoint, way: str, prompts: list[str], options: dict
) -> Iterator[tuple[str, list[int], int]]:
    """Yield (prompt, answer, forwards) as they are finished."""
    batch_size = int(way.rpartition("-")[2])
    if way.startswith("hf"):
        for prompt in prompts:
            yield prompt, stock_answer(checkpoint, prompt, options["max_new_tokens"]), 0
        return
    requests = [prepare(checkpoint, prompt, DecodingOptions(**options)) for prompt in prompts]
    for event in decode(checkpoint.model, requests, batch_size=batch_size):
        if event.result is not None:
            result = event.result
            yield prompts[event.index], result.token_ids, result.forwards


@torch.no_grad()
def stock_answer(checkpoint: Checkpoint, prompt: str, max_new_tokens: int) -> list[int]:
    """Decode greedily with `transformers`."""
    ids = torch.tensor([encode(checkpoint.tokenizer, prompt)])
    output = checkpoint.model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def measure(checkpoint: Checkpoint, prompts: list[str], args: argparse.Namespace) -> None:
    """Append what is missing to the file."""
    done = {key(record) for record in read(args.out)}
    for way in args.ways:
        for temperature in args.temperatures:
            for seed in args.seeds if temperature else args.seeds[:1]:
                settings = {"way": way, "temperature": temperature, "seed": seed}
                options = options_of(way, args, temperature, seed)
                missing = [p for p in prompts if key(settings | {"prompt": p}) not in done]
                with args.out.open("a") as file:
                    for prompt, ids, forwards in answers(checkpoint, way, missing, options):
                        record = settings | {"prompt": prompt, "ids": ids, "forwards": forwards}
                        file.write(json.dumps(record) + "\n")
                        file.flush()


def read(path: Path) -> list[dict]:
    """Read what was measured already."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key(record: dict) -> tuple:
    """Identify an answer."""
    return record["way"], record["temperature"], record["seed"], record["prompt"]


def compare(records: list[dict], reference: str) -> list[dict]:
    """Count, for each way, answers equal to the reference's."""
    by_way: dict[str, dict] = defaultdict(dict)
    for record in records:
        by_way[record["way"]][key(record)[1:]] = record
    rows = []
    for way, found in by_way.items():
        pairs = [(r, by_way[reference][k]) for k, r in found.items() if k in by_way[reference]]
        forwards = sum(r["forwards"] for r, _ in pairs)
        tokens = sum(len(r["ids"]) for r, _ in pairs)
        equal = sum(r["ids"] == expected["ids"] for r, expected in pairs)
        rows.append(
            {
                "way": way,
                "answers": len(pairs),
                "equal": equal,
                "share": round(equal / len(pairs), 4) if pairs else None,
                "tokens_per_forward": round(tokens / forwards, 3) if forwards else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--ways", nargs="+", default=["ar-1", "full-1", "full-8"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--reference")
    args = parser.parse_args()
    is_greedy_float32 = args.dtype == "float32" and args.temperatures == [0.0]
    reference = args.reference or ("hf-1" if is_greedy_float32 else "ar-1")
    args.ways = list(dict.fromkeys([reference, *args.ways]))
    checkpoint = load(args.model, adapter=args.adapter, dtype=args.dtype)
    measure(checkpoint, interleave(read_prompts(args.data), args.prompts), args)
    print(json.dumps({"environment": describe_environment(), "reference": reference}))
    for row in compare(read(args.out), reference):
        print(*(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
