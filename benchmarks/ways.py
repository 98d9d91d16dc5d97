"""Ways of decoding the same prompts, run in turns: what the benchmarks have in common."""

import statistics
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from mars import generate
from mars.checkpoint import Checkpoint
from mars.decoding.request import DraftOutcome


@dataclass
class Tally:
    """What one way of decoding did, group by group."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    forwards: int = 0
    answers: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    outcomes: list[DraftOutcome] = field(default_factory=list)

    @property
    def speed(self) -> list[float]:
        return [n / s for n, s in zip(self.tokens, self.seconds, strict=True)]


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the groups of the ratio within a group."""
    return statistics.median(ratios(ours, theirs))


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Return the ratio within every group."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def cut_at_end(token_ids: list[int], end_ids: Container[int]) -> list[int]:
    """Return the tokens up to the first that ends the text, which is kept."""
    end = next((i + 1 for i, token in enumerate(token_ids) if token in end_ids), None)
    return token_ids[:end]


def ours(checkpoint: Checkpoint, batch_size: int, max_new_tokens: int, **options) -> Callable:
    """Decode with this package."""

    def run(prompts: list[str], tally: Tally) -> None:
        started = time.perf_counter()
        results = generate(
            checkpoint, prompts, batch_size=batch_size, max_new_tokens=max_new_tokens, **options
        )
        tally.seconds.append(time.perf_counter() - started)
        tally.tokens.append(sum(len(r.token_ids) for r in results))
        tally.forwards += sum(r.forwards for r in results)
        tally.answers += [r.text for r in results]
        tally.token_ids += [r.token_ids for r in results]
        tally.outcomes += [outcome for r in results for outcome in r.draft_outcomes]

    return run


def theirs(checkpoint: Checkpoint, batch_size: int, max_new_tokens: int, **options) -> Callable:
    """Decode greedily with `transformers` generate; only tokens up to the end count."""
    tokenizer, model = checkpoint.tokenizer, checkpoint.model

    def run(prompts: list[str], tally: Tally) -> None:
        tokenizer.padding_side = "left"
        started, tokens = time.perf_counter(), 0
        for first in range(0, len(prompts), batch_size):
            chats = [[{"role": "user", "content": p}] for p in prompts[first : first + batch_size]]
            inputs = tokenizer.apply_chat_template(
                chats,
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
            )
            output = model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, **options
            )
            for row in output[:, inputs["input_ids"].shape[1] :].tolist():
                answer = cut_at_end(row, checkpoint.eos_token_ids)
                tokens += len(answer)
                tally.token_ids.append(answer)
                tally.answers.append(tokenizer.decode(answer, skip_special_tokens=True))
        tally.seconds.append(time.perf_counter() - started)
        tally.tokens.append(tokens)

    return run


def measure_decoding(
    ways: dict[str, Callable], prompts: list[str], groups: int
) -> dict[str, Tally]:
    """Run every way on every group, interleaved; the first run of each is a warm-up."""
    tallies = {name: Tally() for name in ways}
    for run in ways.values():
        run(prompts[:2], Tally())
    for group in range(groups):
        for name, run in ways.items():
            run(prompts[group::groups], tallies[name])
            print(f"group {group + 1}/{groups}: {name} done", file=sys.stderr)
    return tallies
