"""The prompts of the benchmarks, and groups of them."""

import gzip
import json
from pathlib import Path
from typing import Any

COMPLETE = "Complete the following Python function.\n\n```python\n{code}\n```"
CHAT_PROMPTS = 60


def read_prompts(folder: Path) -> dict[str, list[str]]:
    """Return the evaluation prompts by set.

    The folder holds gsm8k_test.jsonl, HumanEval.jsonl.gz and user_oriented_instructions.jsonl, of
    which the last 60 are `chat`: no adapter was trained on any of these.
    """
    maths = [json.loads(line) for line in (folder / "gsm8k_test.jsonl").open()]
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt") as file:
        code = [json.loads(line) for line in file]
    everyday = [json.loads(line) for line in (folder / "user_oriented_instructions.jsonl").open()][
        -CHAT_PROMPTS:
    ]
    chat = []
    for record in everyday:
        given = record["instances"][0]["input"].strip()
        chat.append(f"{record['instruction']}\n\n{given}" if given else record["instruction"])
    return {
        "gsm8k": [record["question"] for record in maths],
        "humaneval": [COMPLETE.format(code=record["prompt"].rstrip()) for record in code],
        "chat": chat,
    }


def spread(items: list[Any], count: int) -> list[Any]:
    """Take `count` items, evenly spread; some several times if there are fewer."""
    return [items[i * len(items) // count] for i in range(count)]


def groups_of(items: list[Any], groups: int, size: int) -> list[list[Any]]:
    """Make groups of `size` items that all look alike; none holds an item twice if it can."""
    chosen = spread(items, groups * size)
    return [chosen[group::groups] for group in range(groups)]
