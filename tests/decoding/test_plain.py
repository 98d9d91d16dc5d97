"""The kernel that decides for plain rows says what `step.decide` says."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.decoding import plain
from mars.decoding.options import DecodingOptions
from mars.decoding.plan import RowPlan
from mars.decoding.request import Progress, Request
from mars.decoding.sampling import filter_logits
from mars.decoding.step import StepParams, decide
from mars.draft_head import Correction, DraftHead
from mars.engine.kernels.compiler import load_kernels
from mars.engine.runner import FlatOutputs
from tests.conftest import make_model

WIDTH = 40
DTYPES = [torch.bfloat16, torch.float32]
needs_kernel = pytest.mark.skipif(
    any(load_kernels(dtype) is None for dtype in DTYPES), reason="no C compiler"
)
MODEL = make_model()


SETTINGS = [
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 3.0, "seed": -5},
    {"temperature": 1.0, "top_k": 3, "seed": 2},
    {"temperature": 5.0, "top_k": 1000, "seed": 3},
    {"temperature": 0.9, "top_p": 0.37, "seed": 4},
    {"temperature": 4.0, "top_p": 0.993, "seed": 5},
    {"temperature": 1.3, "min_p": 0.06, "seed": 6},
    {"temperature": 2.0, "min_p": 1e-9, "seed": 7},
    {"temperature": 0.001, "seed": 8},
    {"temperature": 0.001, "top_k": 30, "seed": 9},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.81, "min_p": 0.02, "seed": 2**60},
]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def progress_of(plan: RowPlan, settings: dict | None = None) -> Progress:
    mode = "exact" if plan.drafts or plan.groups else "ar"
    request = Request(
        prompt="",
        prompt_ids=[1, 2, 3],
        options=DecodingOptions(**({"mode": mode} | (settings or {}))),
        window=plan.window,
        end_ids=frozenset(),
        decode=str,
    )
    return Progress(request)


@st.composite
def steps(draw: st.DrawFn) -> tuple[FlatOutputs, list[RowPlan], int | None]:
    """Logits with distinct values in a row, so that there is one right answer, and right drafts."""
    vocabulary = draw(st.sampled_from([1, 5, 40, 127, 128, 300, 5000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    forbidden = draw(st.sampled_from([None, 0, vocabulary - 1])) if vocabulary > 1 else None
    plans = []
    for _ in range(draw(st.integers(1, 4))):
        num_drafts = draw(st.integers(0, 4))
        groups = tuple(sorted(draw(st.sets(st.integers(0, num_drafts), max_size=3))))
        plans.append(RowPlan((0,) * num_drafts, groups, draw(st.integers(1, 3)) if groups else 0))
    num_real, num_masks = [len(p.drafts) + 1 for p in plans], [p.num_masks for p in plans]
    count = sum(num_real) + sum(num_masks)
    ranks = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(count)])
    dtype = draw(st.sampled_from(DTYPES))
    if dtype == torch.bfloat16:
        logits = (0x3F80 + ranks).to(torch.int16).view(torch.bfloat16)  # consecutive from 1 on
    else:
        logits = (ranks - vocabulary // 3) * 0.00390637  # of both signs, with many places
    hidden = torch.randn(count, WIDTH, generator=generator).to(dtype)
    start, drafted = 0, []
    for plan, real in zip(plans, num_real, strict=True):
        said = logits[start : start + real].clone()
        if forbidden is not None:
            said[:, forbidden] = float("-inf")
        right = draw(st.integers(0, len(plan.drafts)))
        tokens = said.argmax(-1).tolist()[: len(plan.drafts)]
        tokens = [t if i < right else (t + 1) % vocabulary for i, t in enumerate(tokens)]
        drafted.append(RowPlan(tuple(tokens), plan.groups, plan.window))
        start += real
    return FlatOutputs(logits, hidden, num_real, num_masks), drafted, forbidden


def both(
    outputs: FlatOutputs,
    plans: list[RowPlan],
    forbidden: int | None,
    settings: list[dict] | None = None,
) -> tuple[list, list]:
    chosen = settings or [{}] * len(plans)
    rows = [progress_of(plan, row) for plan, row in zip(plans, chosen, strict=True)]
    params = StepParams.of([row.request for row in rows], outputs.logits_OV.shape[1], "cpu")
    assert all(params.are_plain)
    real, masks, found = outputs.padded(MODEL)
    slow = decide(real.clone(), masks.clone(), rows, plans, params, [], forbidden, found)
    fast = plain._decide_plain(outputs, MODEL, rows, plans, forbidden)
    assert fast is not None
    return fast, slow


@needs_kernel
@settings(deadline=None, max_examples=150)
@given(steps())
def test_it_says_what_the_slow_way_says(step) -> None:
    for fast, slow in zip(*both(*step), strict=True):
        assert (fast.tokens, fast.num_accepted) == (slow.tokens, slow.num_accepted)
        assert [draft.token for draft in fast.drafts] == [draft.token for draft in slow.drafts]
        for mine, theirs in zip(fast.drafts, slow.drafts, strict=True):
            assert mine.confidence == pytest.approx(theirs.confidence, rel=1e-4)


@needs_kernel
@settings(deadline=None, max_examples=300)
@given(steps(), st.data())
def test_it_samples_as_in_the_slow_way(step, data: st.DataObject) -> None:
    outputs, plans, forbidden = step
    # Powers of two: of equal logits, either may be the last that a filter keeps.
    outputs = outputs._replace(logits_OV=outputs.logits_OV * data.draw(st.sampled_from([1, 8, 64])))
    chosen = [data.draw(st.sampled_from(SETTINGS)) for _ in plans]
    with threads(data.draw(st.sampled_from([1, 2]))):
        pairs = both(outputs, plans, forbidden, chosen)
    for fast, slow in zip(*pairs, strict=True):
        assert (fast.tokens, fast.num_accepted) == (slow.tokens, slow.num_accepted)
        assert [draft.token for draft in fast.drafts] == [draft.token for draft in slow.drafts]


@needs_kernel
@settings(deadline=None, max_examples=150)
@given(steps(), st.data())
def test_drafts_that_are_sure_are_said_in_the_threshold_mode(step, data: st.DataObject) -> None:
    outputs, plans, forbidden = step
    outputs = outputs._replace(logits_OV=outputs.logits_OV * data.draw(st.sampled_from([8, 64])))
    chosen = []
    for plan in plans:
        threshold = data.draw(st.sampled_from([0.05, 0.3, 0.9]))
        is_threshold = not plan.drafts and plan.groups
        chosen.append({"mode": "threshold", "threshold": threshold} if is_threshold else {})
    for fast, slow in zip(*both(outputs, plans, forbidden, chosen), strict=True):
        assert (fast.tokens, fast.num_accepted) == (slow.tokens, slow.num_accepted)
        assert [draft.token for draft in fast.drafts] == [draft.token for draft in slow.drafts]


@needs_kernel
@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_samples_have_the_distribution_of_the_filtered_logits(settings: dict) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, float("-inf")]).bfloat16()
    options = DecodingOptions(mode="ar", **settings)
    params = StepParams.of([progress_of(RowPlan(), settings).request], 7, torch.device("cpu"))
    expected = filter_logits(logits[None, None], params.sampling)[0, 0].softmax(-1)
    outputs = FlatOutputs(logits[None], torch.zeros(1, WIDTH).bfloat16(), [1], [0])
    counts = torch.zeros(7)
    for seed in range(2000):
        rows = [progress_of(RowPlan(), settings | {"seed": seed})]
        (decision,) = plain._decide_plain(outputs, MODEL, rows, [RowPlan()], None) or [None]
        assert decision is not None
        counts[decision.tokens[0]] += 1
    assert options.temperature > 0
    assert (counts / 2000 - expected).abs().max() < 0.05


@needs_kernel
@settings(deadline=None, max_examples=150)
@given(steps(), st.integers(0, 1000), st.sampled_from([1, 2, 3]))
def test_the_draft_head_corrects_as_in_the_slow_way(step, seed: int, count: int) -> None:
    outputs, plans, forbidden = step
    generator = torch.Generator().manual_seed(seed)
    head = DraftHead(WIDTH, 24)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    vocabulary = outputs.logits_OV.shape[1]
    embedding, output = (
        torch.randn(vocabulary, WIDTH, generator=generator).to(outputs.hidden_OD.dtype)
        for _ in range(2)
    )
    with pytest.MonkeyPatch.context() as patch:

        def correction(_: object, hidden: torch.Tensor) -> Correction:
            return Correction(hidden, head.requires_grad_(False), embedding, output)

        patch.setattr("mars.decoding.plain.correction", correction)
        patch.setattr("mars.engine.runner.correction", correction)
        with threads(count):  # more of them than rows share every row
            pairs = both(outputs, plans, forbidden)
    for fast, slow in zip(*pairs, strict=True):
        assert (fast.tokens, fast.num_accepted) == (slow.tokens, slow.num_accepted)
        for mine, theirs in zip(fast.drafts, slow.drafts, strict=True):
            assert mine.confidence == pytest.approx(theirs.confidence, rel=0.01, abs=1e-4)
            if mine.token != theirs.token:  # two candidates as good as equal: drafts may part
                assert mine.confidence < 0.51
                break


@needs_kernel
def test_of_equal_logits_the_first_is_said() -> None:
    logits = torch.zeros(1, 300, dtype=torch.bfloat16)
    logits[0, [77, 150, 299]] = 2.0
    outputs = FlatOutputs(logits, torch.zeros(1, WIDTH).bfloat16(), [1], [0])
    rows = [progress_of(RowPlan())]
    (decision,) = plain._decide_plain(outputs, MODEL, rows, [RowPlan()], None) or [None]
    assert decision is not None
    assert decision.tokens == [77]


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {5: 1.0}},
        {"presence_penalty": 0.5},
        {"logprobs": 1},
        {"mode": "threshold", "threshold": 0.9, "confidence": "entropy"},
    ],
)
def test_other_rows_go_the_slow_way(settings: dict) -> None:
    request = Request(
        prompt="",
        prompt_ids=[1],
        options=DecodingOptions(**settings),
        window=2,
        end_ids=frozenset(),
        decode=str,
    )
    assert StepParams.of([request], 10, torch.device("cpu")).are_plain == [False]


@needs_kernel
def test_a_row_is_decided_the_same_way_beside_rows_of_another_kind(monkeypatch) -> None:
    plans = [RowPlan(), RowPlan()]
    rows = [progress_of(plans[0], SETTINGS[1]), progress_of(plans[1], {"logprobs": 0})]
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    outputs = FlatOutputs(logits, torch.zeros(2, WIDTH).bfloat16(), [1, 1], [0, 0])
    asked = []

    def ask(*arguments, **options):
        asked.append(plain_rows(*arguments, **options))
        return asked[-1]

    plain_rows = plain.decide_rows
    monkeypatch.setattr(plain, "decide_rows", ask)
    params = StepParams.of([row.request for row in rows], 300, torch.device("cpu"))
    first, second = plain.decide_outputs(outputs, MODEL, rows, plans, params, [], None)
    assert len(asked) == 1
    assert first.tokens == asked[0][0].tokens
    assert first.logprobs == []
    assert second.tokens == [int(logits[1].argmax())]
    assert len(second.logprobs) == 1
