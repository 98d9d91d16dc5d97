"""The contract of the exact mode: whatever is drafted, it says what `ar` says.

Oracles: the reference, which decodes exact requests as `ar`, and stock `transformers`.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mars.checkpoint import Checkpoint
from mars.counter import uniform
from mars.decoding import plain, scheduler
from mars.decoding.decision import Decision
from mars.decoding.drafts import Draft
from mars.decoding.generate import generate, prepare, stream
from mars.decoding.loop import decode
from mars.decoding.options import DecodingOptions
from mars.decoding.plan import RowPlan
from mars.decoding.request import Progress, Request, Result
from mars.decoding.step import StepParams, decide
from mars.engine.runner import Outputs, Runner
from mars.gated import mask_columns
from tests.conftest import FAMILIES
from tests.decoding import strategies
from tests.decoding.conftest import reference_result, walks

MASK = 3
LAYOUTS = ["linear", "partial", "full"]
# What two modes of saying the same may differ in.
PACE = {
    *("mode", "forwards", "tokens_per_forward"),
    *("acceptance_histogram", "draft_outcomes", "plans", "logprobs"),
}

exact_settings = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["auto", *LAYOUTS]),
        "window": st.sampled_from([None, 0, 1, 2, 4]),
        "ngram": st.booleans(),
        "draft_threshold": st.sampled_from([0.0, 0.0, 0.3]),
        "max_groups": st.integers(1, 3),
    }
)
modes = st.one_of(
    exact_settings,
    exact_settings,
    exact_settings,
    st.just({"mode": "ar"}),
    st.builds(
        lambda tau, window: {"mode": "threshold", "threshold": tau, "window": window},
        st.sampled_from([0.3, 0.7]),
        st.sampled_from([2, 4]),
    ),
)
stops = st.sampled_from(
    [{}, {"ignore_eos": True}, {"stop": ("H", "JKL")}, {"stop_token_ids": (44, 70)}]
)
all_options = strategies.options(modes, strategies.penalties(45, 46), stops, most_tokens=40)
# Mostly what the model knows how to go on with.
prompt_ids = st.one_of(
    st.builds(
        lambda seed, length: walks(1, length, torch.Generator().manual_seed(seed))[0].tolist(),
        st.integers(0, 99),
        st.integers(1, 20),
    ),
    st.lists(st.integers(4, 259), min_size=1, max_size=20),
)
batches = st.lists(st.tuples(prompt_ids, all_options), min_size=1, max_size=5)


def what_is_said(result: Result | dict[str, Any]) -> dict[str, Any]:
    record = result if isinstance(result, dict) else dataclasses.asdict(result)
    return {k: v for k, v in record.items() if k not in PACE and not k.endswith("seconds")}


def decode_all(
    checkpoint: Checkpoint, requests: list[Request], **kwargs: Any
) -> tuple[list[Result], list[str]]:
    assert checkpoint.mars is not None
    mask_token_id = checkpoint.mars.mask_token_id
    results: dict[int, Result] = {}
    texts = [""] * len(requests)
    for event in decode(checkpoint.model, requests, mask_token_id=mask_token_id, **kwargs):
        texts[event.index] += event.text
        if event.result is not None:
            results[event.index] = event.result
    return [results[index] for index in range(len(requests))], texts


def check_batch(
    checkpoint: Checkpoint,
    rows: list[tuple[list[int], DecodingOptions]],
    batch_size: int,
    chunk: int = 512,
) -> list[Result]:
    requests = [prepare(checkpoint, ids, options) for ids, options in rows]
    results, texts = decode_all(checkpoint, requests, batch_size=batch_size, prefill_chunk=chunk)
    for (ids, options), result, text in zip(rows, results, texts, strict=True):
        assert what_is_said(result) == what_is_said(reference_result(checkpoint, ids, options))
        assert text == result.text
        assert checkpoint.mars is not None
        assert checkpoint.mars.mask_token_id not in result.token_ids
        assert sum(k * n for k, n in enumerate(result.acceptance_histogram)) == len(
            result.token_ids
        )
    return results


# Derandomised: logits that are equal to the last bits would fail one run in very many.
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(batches, st.integers(1, 5), st.sampled_from([1, 3, 16, 512]))
def test_exact_says_what_ar_says(
    drafter: Checkpoint,
    rows: list[tuple[list[int], DecodingOptions]],
    batch_size: int,
    chunk: int,
) -> None:
    check_batch(drafter, rows, batch_size, chunk)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(batches, st.integers(1, 5))
def test_exact_says_what_ar_says_without_any_training(
    llama: Checkpoint, rows: list[tuple[list[int], DecodingOptions]], batch_size: int
) -> None:
    check_batch(llama, rows, batch_size)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(prompt_ids, all_options.filter(lambda options: options.mode != "threshold")),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4),
)
def test_exact_with_a_gated_adapter_says_what_its_base_model_says(
    gated_drafter: Checkpoint,
    headed_drafter: Checkpoint,
    rows: list[tuple[list[int], DecodingOptions]],
    batch_size: int,
) -> None:
    """The reference knows nothing of adapters."""
    check_batch(gated_drafter, rows, batch_size)
    check_batch(headed_drafter, rows, batch_size)


@pytest.mark.usefixtures("stock_forward")
def test_draft_head_sees_the_token_before_each_draft(headed_drafter: Checkpoint) -> None:
    """A slow computation of the drafts of one step, mask by mask."""
    model, adapter = headed_drafter.model, headed_drafter.adapter
    assert adapter is not None
    assert adapter.head is not None
    prompts = walks(6, 9, torch.Generator().manual_seed(5)).tolist()
    options = DecodingOptions(max_new_tokens=20, ngram=False)
    for prompt in prompts:
        row = Progress(prepare(headed_drafter, prompt, options))
        runner = Runner(model, num_rows=1, max_positions=64)
        runner.add_row()
        plan = RowPlan(groups=(0,), window=4)
        outputs = runner.run(0, [row.tokens], [plan])
        assert isinstance(outputs, Outputs)
        real, masks, correction = outputs
        params = StepParams.of([row.request], real.shape[-1], real.device)
        (decision,) = decide(real, masks, [row], [plan], params, [], None, correction)
        length = len(prompt)
        with torch.no_grad(), mask_columns(model, length, torch.arange(4)[None]):
            ids = torch.tensor([[*prompt, 0, 0, 0, 0]])
            hidden = model.model(ids, use_cache=False).last_hidden_state[0]
            previous = int(model.lm_head(hidden[length - 1]).argmax())
            assert decision.tokens == [previous]
            for draft, mask in zip(decision.drafts, hidden[length:], strict=True):
                likely = model.lm_head(mask).topk(32).indices
                token = torch.tensor(previous)
                corrected = adapter.head(mask, model.model.embed_tokens.weight[token])
                logits = model.lm_head(corrected)[likely]
                previous = int(likely[logits.argmax()])
                assert draft.token == previous
                assert draft.confidence == pytest.approx(float(logits.softmax(0).max()), abs=1e-4)


def test_draft_head_raises_acceptance(
    gated_drafter: Checkpoint, headed_drafter: Checkpoint
) -> None:
    prompts = walks(24, 9, torch.Generator().manual_seed(5)).tolist()
    options = {"max_new_tokens": 48, "ignore_eos": True, "ngram": False, "temperature": 0.5}
    forwards = [
        sum(r.forwards for r in generate(checkpoint, prompts, **options))
        for checkpoint in (gated_drafter, headed_drafter)
    ]
    assert forwards[1] < 0.9 * forwards[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_of_a_gated_adapter_are_accepted_in_runs_of_every_length(
    gated_drafter: Checkpoint, layout: str
) -> None:
    prompts = walks(24, 9, torch.Generator().manual_seed(5)).tolist()
    options = {"max_new_tokens": 48, "ignore_eos": True, "ngram": False, "temperature": 0.5}
    results = generate(gated_drafter, prompts, layout=layout, **options)
    seen = Counter[int]()
    for result in results:
        seen.update(dict(enumerate(result.acceptance_histogram)))
    assert all(seen[k] > 0 for k in range(1, 6)), seen


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_and_ngrams_are_accepted_in_runs_of_every_length(
    drafter: Checkpoint, layout: str, temperature: float
) -> None:
    """Otherwise the tests above would show little."""
    prompts = walks(24, 9, torch.Generator().manual_seed(5)).tolist()
    options = {"temperature": temperature, "max_new_tokens": 48, "ignore_eos": True, "seed": 3}
    ar = generate(drafter, prompts, mode="ar", **options)
    for ngram in (False, True):
        results = generate(drafter, prompts, layout=layout, ngram=ngram, batch_size=5, **options)
        seen = Counter[int]()
        for result, expected in zip(results, ar, strict=True):
            assert what_is_said(result) == what_is_said(expected)
            assert result.mode == "exact"
            seen.update(dict(enumerate(result.acceptance_histogram)))
        assert all(seen[k] > 0 for k in range(1, 6)), seen
        assert any(seen[k] > 0 for k in range(10, 18)) == ngram, seen
        assert seen[0] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_equals_transformers(
    family: str, tiny_checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts come from the answer itself, some of them spoilt: so every run length occurs."""
    checkpoint = tiny_checkpoint(family)
    prompts = [[9, 8, 7], [40], [5, 6] * 20, [100, 101, 102, 103]]
    expected = []
    for ids in prompts:
        output = checkpoint.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            suppress_tokens=[MASK],
            eos_token_id=None,
        )
        expected.append(output[0].tolist())
    answers = {tuple(ids): answer for ids, answer in zip(prompts, expected, strict=True)}
    draft_from(answers, monkeypatch)
    seen = Counter[int]()
    for layout in LAYOUTS:
        for batch_size in (1, 3):
            results = generate(
                checkpoint,
                prompts,
                layout=layout,
                max_new_tokens=40,
                batch_size=batch_size,
                ignore_eos=True,
            )
            for ids, answer, result in zip(prompts, expected, results, strict=True):
                assert result.token_ids == answer[len(ids) :]
                seen.update(dict(enumerate(result.acceptance_histogram)))
    assert all(seen[k] > 0 for k in range(1, 6)), seen


def draft_from(answers: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what masks predict by what is true, spoilt with probability 1/4 at every token."""
    decide = scheduler.decide_outputs

    def spoilt(outputs: Any, model: Any, rows: Any, plans: Any, *rest: Any) -> list[Decision]:
        decisions = decide(outputs, model, rows, plans, *rest)
        replaced = []
        for row, plan, decision in zip(rows, plans, decisions, strict=True):
            start = len(row.tokens) + len(decision.tokens)
            truth = answers[tuple(row.request.prompt_ids)][start : start + plan.window]
            drafts = [
                Draft(token if uniform(start, place) > 0.25 else 259, 0.8)
                for place, token in enumerate(truth)
            ]
            has_group = decision.num_accepted in plan.groups
            replaced.append(dataclasses.replace(decision, drafts=drafts if has_group else []))
        return replaced

    monkeypatch.setattr(scheduler, "decide_outputs", spoilt)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_round_has_drafts_in_the_full_layout_alone(drafter: Checkpoint, layout: str) -> None:
    ids = walks(1, 9, torch.Generator().manual_seed(5))[0].tolist()
    options = {"max_new_tokens": 60, "ignore_eos": True, "ngram": False, "temperature": 1.0}
    pace = {
        layout: generate(drafter, ids, layout=layout, **options).tokens_per_forward
        for layout in LAYOUTS
    }
    assert 1 < pace["linear"] <= pace["partial"] <= pace["full"]


def test_drafts_below_the_bound_are_not_fed(drafter: Checkpoint) -> None:
    ids = walks(1, 9, torch.Generator().manual_seed(5))[0].tolist()
    options = {"max_new_tokens": 40, "ignore_eos": True, "ngram": False}
    none = generate(drafter, ids, draft_threshold=1.0, **options)
    some = generate(drafter, ids, draft_threshold=0.3, **options)
    every = generate(drafter, ids, **options)
    assert none.tokens_per_forward == 1.0
    assert none.token_ids == some.token_ids == every.token_ids
    assert 1 < some.tokens_per_forward <= every.tokens_per_forward


def test_a_plain_model_drafts_from_what_it_repeats(drafter: Checkpoint) -> None:
    plain = dataclasses.replace(drafter, mars=None)
    options = {"max_new_tokens": 200, "ignore_eos": True, "logit_bias": {MASK: -100.0}}
    ids = [*range(40, 72), 40, 41, 42]
    result = generate(plain, ids, **options)
    assert result.mode == "exact"
    assert result.token_ids == generate(plain, ids, mode="ar", **options).token_ids
    assert result.tokens_per_forward > 3


def test_streamed_equals_generated(drafter: Checkpoint) -> None:
    options = DecodingOptions(max_new_tokens=60, stop=("zz",), ignore_eos=True)
    pieces = stream(drafter, [45, 46, 47], options)
    texts = list(pieces)
    assert pieces.result is not None
    assert "".join(texts) == pieces.result.text == generate(drafter, [45, 46, 47], options).text


def test_a_row_that_fills_the_context(tiny_checkpoint: Callable[..., Checkpoint]) -> None:
    checkpoint = tiny_checkpoint("llama", max_position_embeddings=32)
    rows = [
        ([5, 6] * 14, DecodingOptions(max_new_tokens=4, ignore_eos=True)),
        ([6] * 4, DecodingOptions(max_new_tokens=28, ignore_eos=True)),
        ([7] * 31, DecodingOptions(max_new_tokens=1, ignore_eos=True)),
    ]
    check_batch(checkpoint, rows, batch_size=3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "penalty", [{}, {"repetition_penalty": 1.2}, {"logit_bias": {50: 3.0}}], ids=str
)
def test_logprobs_are_those_of_ar(
    drafter: Checkpoint, temperature: float, penalty: dict[str, Any]
) -> None:
    prompts = walks(3, 9, torch.Generator().manual_seed(5)).tolist()
    common = {"max_new_tokens": 30, "temperature": temperature, "top_k": 5, **penalty}
    rows = [
        (ids, DecodingOptions(logprobs=num, **common))
        for ids, num in zip(prompts, (0, 3, None), strict=True)
    ]
    requests = [prepare(drafter, ids, options) for ids, options in rows]
    collected: list[list] = [[] for _ in rows]
    results: dict[int, Result] = {}
    for event in decode(drafter.model, requests, mask_token_id=MASK):
        collected[event.index] += event.logprobs or []
        assert (event.logprobs is None) == (rows[event.index][1].logprobs is None)
        if event.result is not None:
            results[event.index] = event.result
    assert max(results[i].tokens_per_forward for i in range(3)) > 1
    for index, (ids, options) in enumerate(rows):
        expected = reference_result(drafter, ids, options)["logprobs"]
        logprobs = results[index].logprobs
        if options.logprobs is None:
            assert logprobs is expected is None
            continue
        assert logprobs == collected[index]
        assert [entry.token_id for entry in logprobs] == results[index].token_ids
        for entry, wanted in zip(logprobs, expected, strict=True):
            assert entry.token_id == wanted["token_id"]
            assert entry.logprob == pytest.approx(wanted["logprob"], abs=1e-4)
            assert list(entry.top) == list(wanted["top"])
            assert list(entry.top.values()) == pytest.approx([*wanted["top"].values()], abs=1e-4)
            assert len(entry.top) == options.logprobs
            assert MASK not in entry.top


def test_hooks_see_the_tokens_of_ar(drafter: Checkpoint) -> None:
    """A processor that forbids the last two tokens, beside rows without one."""

    def hook(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[tokens[-2:]] = -50.0
        logits[40 + sum(tokens) % 32] += 1.0
        return logits

    prompts = walks(3, 9, torch.Generator().manual_seed(5)).tolist()
    options = DecodingOptions(max_new_tokens=30, ignore_eos=True)
    requests = [prepare(drafter, ids, options) for ids in prompts]
    requests[0] = dataclasses.replace(requests[0], logits_hook=hook)
    ar = [dataclasses.replace(r, options=dataclasses.replace(options, mode="ar")) for r in requests]
    exact, _ = decode_all(drafter, requests)
    expected, _ = decode_all(drafter, ar)
    assert [r.token_ids for r in exact] == [r.token_ids for r in expected]
    assert exact[0].tokens_per_forward > 1


@pytest.mark.usefixtures("stock_forward")
def test_one_transfer_to_the_host_per_step(
    drafter: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, transfers = [], []
    decide, to_host = plain.decide, torch.Tensor.cpu
    monkeypatch.setattr(plain, "decide", lambda *a: steps.append(1) or decide(*a))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: transfers.append(1) or to_host(t))
    generate(drafter, [45, 46, 47], max_new_tokens=20, ignore_eos=True, temperature=1.0)
    assert len(steps) == len(transfers) > 3
