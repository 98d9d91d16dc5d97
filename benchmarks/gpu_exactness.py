"""Is exact exact on this device? Token for token, and number for number.

Drafts of random models are never right, so right and wrong ones are put into their place; what is
said is all theirs, and the verification has to find out which were right.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_models import WINDOW, Subject
from replay import Trace, replay, suggested

from mars.decoding.drafts import Draft
from mars.decoding.loop import decode
from mars.decoding.options import DecodingOptions, Layout
from mars.decoding.plan import RowPlan
from mars.engine.runner import Runner
from mars.evaluation.agreement import agreement
from mars.gated import mask_columns

LAYOUTS: tuple[Layout, ...] = ("linear", "partial", "full")
_RIGHT = 0.75  # share of right drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Answers of one way beside those of a reference."""

    model: str
    dtype: str
    reference: str
    way: str
    rows: int
    answers: int
    equal: float
    """Share of answers that are the reference's."""
    same_start: float
    """Share of tokens before the first difference."""
    tokens_per_forward: float


@torch.no_grad()
def uncached(subject: Subject, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Decode greedily with the stock model, the whole text in every forward."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        ids = torch.tensor([tokens], device=subject.device)
        tokens.append(int(subject.stock(ids, use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def stock_answer(subject: Subject, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Decode greedily with `transformers` generate."""
    ids = torch.tensor([list(prompt)], device=subject.device)
    is_real = torch.ones_like(ids)
    output = subject.stock.generate(
        ids, attention_mask=is_real, max_new_tokens=new_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def our_answers(
    subject: Subject, traces: Sequence[Trace], new_tokens: int, rows: int, **options: Any
) -> tuple[list[list[int]], float]:
    """Decode with this package, `rows` rows at a time; return answers and tokens per forward."""
    settings = DecodingOptions(max_new_tokens=new_tokens, **options)
    by_name = {str(number): trace for number, trace in enumerate(traces)}
    requests = [trace.request(name, settings, subject.decode) for name, trace in by_name.items()]
    with replay(by_name, suggested):
        events = list(decode(subject.model, requests, batch_size=rows))
    results = {event.index: event.result for event in events if event.result is not None}
    answers = [results[index].token_ids for index in range(len(traces))]
    forwards = sum(result.forwards for result in results.values())
    return answers, sum(map(len, answers)) / forwards


def guesses(prompt: list[int], answer: list[int], vocabulary: int, seed: int) -> Trace:
    """Make a trace whose drafts are mostly right, at every place of the answer."""
    chance = random.Random(seed)
    drafts = []
    for known in range(len(answer) + 1):
        tokens = [
            token if chance.random() < _RIGHT else (token + 1) % vocabulary
            for token in answer[known : known + WINDOW]
        ]
        drafts.append([Draft(token, chance.uniform(0.3, 0.95)) for token in tokens])
    return Trace(prompt, answer, drafts)


def random_prompts(count: int, vocabulary: int, lengths: range) -> list[list[int]]:
    """Draw prompts of ragged lengths."""
    chance = random.Random(0)
    return [
        [chance.randrange(vocabulary) for _ in range(chance.choice(lengths))] for _ in range(count)
    ]


def compare(
    subject: Subject, prompts: Sequence[list[int]], new_tokens: int, *, against_ar: bool = False
) -> Iterator[Comparison]:
    """Compare `ar` and the layouts of `exact`, alone and in a batch, with one reference.

    The reference is the stock model without a cache; with `against_ar`, `ar` with one row, and
    `transformers` generate is a way like the others.
    """
    vocabulary = subject.model.config.get_text_config().vocab_size
    empty = [Trace(prompt, [], []) for prompt in prompts]
    alone, _ = our_answers(subject, empty, new_tokens, 1, mode="ar")
    name, expected = ("ar", alone) if against_ar else ("uncached", [])
    if not against_ar:
        expected = [uncached(subject, prompt, new_tokens) for prompt in prompts]

    def compared(way: str, rows: int, answers: list[list[int]], rate: float) -> Comparison:
        start, equal = agreement(answers, expected)
        return Comparison(
            model=subject.name,
            dtype=str(subject.model.dtype).removeprefix("torch."),
            reference=name,
            way=way,
            rows=rows,
            answers=len(answers),
            equal=round(equal, 4),
            same_start=round(start, 4),
            tokens_per_forward=round(rate, 3),
        )

    yield compared("ar", 1, alone, 1.0)
    if against_ar:
        stock = [stock_answer(subject, prompt, new_tokens) for prompt in prompts]
        yield compared("transformers", 1, stock, 1.0)
    yield compared(
        "ar", len(prompts), *our_answers(subject, empty, new_tokens, len(prompts), mode="ar")
    )
    traces = [
        guesses(prompt, answer, vocabulary, seed)
        for seed, (prompt, answer) in enumerate(zip(prompts, expected, strict=True))
    ]
    for layout in LAYOUTS:
        for rows in (1, len(prompts)):
            found = our_answers(subject, traces, new_tokens, rows, layout=layout)
            yield compared(f"exact-{layout}", rows, *found)


@torch.no_grad()
def numeric_errors(subject: Subject, steps: int = 6) -> dict[str, float]:
    """Let rows accept at random, then compare with the same model without a cache.

    Returns:
        The largest difference of logits of real columns and of masks (both of the last step), and
        of keys and values in the cache, against one that has read the texts at once.
    """
    chance, vocabulary = random.Random(0), subject.model.config.get_text_config().vocab_size
    texts = random_prompts(3, vocabulary, range(64, 65))
    lengths, rights, drafts = [5, 17, 11], [0, 0, 0], [[], [], []]
    runner = _runner(subject, len(texts))
    real_BCV, mask_BMV = runner.forward(0, _cut(texts, lengths), [RowPlan()] * len(texts))
    for _ in range(steps):
        lengths = [n + right + 1 for n, right in zip(lengths, rights, strict=True)]
        rights = [chance.randrange(4) for _ in texts]
        drafts = [
            [*text[n : n + right], (text[n + right] + 1) % vocabulary]  # the last one is wrong
            for text, n, right in zip(texts, lengths, rights, strict=True)
        ]
        plans = [RowPlan(tuple(d), tuple(range(len(d) + 1)), WINDOW) for d in drafts]
        real_BCV, mask_BMV = runner.forward(0, _cut(texts, lengths), plans)
        runner.keep(0, rights)
    errors = {"real_logits": 0.0, "mask_logits": 0.0, "cache": 0.0}

    def note(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        errors[name] = max(errors[name], (found - expected).abs().max().item())

    fresh = _runner(subject, len(texts))
    fresh.read(0, _cut(texts, runner.cached))
    for row, (text, n, right) in enumerate(zip(texts, lengths, rights, strict=True)):
        count = len(drafts[row]) + 1
        ids = torch.tensor([text[:n] + drafts[row]], device=subject.device)
        note("real_logits", real_BCV[row, -count:], subject.stock(ids).logits[0, -count:])
        masks = slice(right * WINDOW, (right + 1) * WINDOW)
        expected = _mask_logits(subject, text[: n + right])
        note("mask_logits", mask_BMV[row, masks], expected)
        kept = slice(runner.cached[row])
        for name in ("keys", "values"):
            pairs = zip(getattr(runner.cache, name), getattr(fresh.cache, name), strict=True)
            for found, expected in pairs:
                note("cache", found[row, :, kept], expected[row, :, kept])
    return errors


def _mask_logits(subject: Subject, prefix: list[int]) -> torch.Tensor:
    """Return what a group of masks says behind a text, without a cache: (W, V)."""
    device = subject.device
    ids = torch.tensor([prefix + [0] * WINDOW], device=device)
    with mask_columns(subject.model, len(prefix), torch.arange(WINDOW, device=device)[None]):
        return subject.model(ids, use_cache=False).logits[0, -WINDOW:]


def _runner(subject: Subject, rows: int) -> Runner:
    runner = Runner(subject.model, num_rows=rows, max_positions=128)
    for _ in range(rows):
        runner.add_row()
    return runner


def _cut(texts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    return [text[:length] for text, length in zip(texts, lengths, strict=True)]
