"""Write the prompts that the shipped adapter was trained on, mixed, one JSON object a line.

    python recipes/adapter/make_prompts.py DATA prompts.jsonl

DATA holds gsm8k_train.jsonl (openai/grade-school-math, MIT), mbpp.jsonl (google-research, CC BY
4.0), t0_prompts.jsonl, seed_tasks.jsonl and user_oriented_instructions.jsonl
(yizhongw/self-instruct, Apache-2.0). The prompts of the demo, written for this project, join them.
Only prompts are used, never the answers: `mars distill` lets the model answer itself. The last 60
of the 252 user-oriented instructions are left out for evaluation.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

EVALUATION_INSTRUCTIONS = 60
MOST_CHARACTERS = 1200  # few are longer; their answers cost as much as several others
COMPLETE = "Complete the following Python function.\n\n```python\n{code}\n```"


def read(path: Path) -> list[dict]:
    """Read a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def grade_school_maths(folder: Path) -> Iterator[str]:
    """Yield the training questions of GSM8K."""
    for record in read(folder / "gsm8k_train.jsonl"):
        yield record["question"]


def python_tasks(folder: Path) -> Iterator[str]:
    """Yield each MBPP task in two forms: text with a test, and a function to complete."""
    for record in read(folder / "mbpp.jsonl"):
        task, test = record["text"].strip(), record["test_list"][0]
        called = re.search(r"assert\s+\(?(?:\w+\()*?(\w+)\(", test)
        name = called.group(1) if called else ""
        yield f"{task}\nYour code should pass this test:\n{test}"
        signature = re.search(rf"^def {name}\s*\(.*\)\s*:", record["code"], re.MULTILINE)
        if name and signature:
            docstring = task.replace("Write a python function to ", "")
            docstring = docstring.replace("Write a function to ", "")
            expression = test.removeprefix("assert").strip()
            code = (
                f'{signature.group(0)}\n    """{docstring}\n    >>> {expression}\n    True\n    """'
            )
            yield COMPLETE.format(code=code)


def instruction_with_input(record: dict) -> str:
    """Return an instruction with the input of its first instance."""
    given = record["instances"][0]["input"].strip()
    return f"{record['instruction']}\n\n{given}" if given else record["instruction"]


def instructions(folder: Path) -> Iterator[str]:
    """Yield everyday instructions: the seed tasks and the first of the user-oriented ones."""
    everyday = read(folder / "user_oriented_instructions.jsonl")[:-EVALUATION_INSTRUCTIONS]
    for record in read(folder / "seed_tasks.jsonl") + everyday:
        yield instruction_with_input(record)


def task_templates(folder: Path) -> Iterator[str]:
    """Yield the T0 prompts."""
    for record in read(folder / "t0_prompts.jsonl"):
        yield record["prompt"].replace("\r\n", "\n").strip()


def own_prompts(_: Path) -> Iterator[str]:
    """Yield the prompts that were written for this project."""
    for line in files("mars.demo").joinpath("train_prompts.jsonl").read_text().splitlines():
        yield json.loads(line)["prompt"]


# Source: how to read it, most prompts, and the share of the file over which they are spread: a run
# that does not reach the end has still seen the small sources.
SOURCES = {
    "gsm8k": (grade_school_maths, 2500, 1.0),
    "mbpp": (python_tasks, 2500, 1.0),
    "t0": (task_templates, 2500, 1.0),
    "instructions": (instructions, 2500, 0.4),
    "own": (own_prompts, 2500, 0.4),
}


def main() -> None:
    """Collect, drop duplicates, and mix such that every stretch of the file holds every source."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    mixed: list[tuple[float, str, str]] = []
    seen: set[str] = set()
    for source, (collect, most, spread) in SOURCES.items():
        prompts = [p for p in dict.fromkeys(collect(arguments.data)) if p and p not in seen]
        random.Random(source).shuffle(prompts)
        prompts = prompts[:most]
        seen.update(prompts)
        mixed += [((i + 0.5) / len(prompts) * spread, source, p) for i, p in enumerate(prompts)]
        print(f"{source}: {len(prompts)} prompts")
    with arguments.output.open("w") as file:
        for _, source, prompt in sorted(mixed):
            if len(prompt) <= MOST_CHARACTERS:
                file.write(json.dumps({"prompt": prompt, "source": source}) + "\n")


if __name__ == "__main__":
    main()
