"""Write the demo's training set: its prompts with the greedy answers of the default model.

    python benchmarks/make_demo_answers.py src/mars/demo

The prompts were written for this project. The answers come from the AR mode in bfloat16, at most
192 tokens; prompts whose answer did not end by then are left out.
"""

import argparse
import json
from pathlib import Path

from mars import generate, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="reads train_prompts.jsonl, writes train.jsonl")
    folder = parser.parse_args().folder
    with (folder / "train_prompts.jsonl").open() as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    checkpoint = load(dtype="bfloat16")
    results = generate(checkpoint, prompts, mode="ar", max_new_tokens=192, batch_size=16)
    with (folder / "train.jsonl").open("w") as file:
        for prompt, result in zip(prompts, results, strict=True):
            if result.finish_reason == "stop":
                messages = [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": result.text},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
