"""`benchmarks/replay.py`: a random model that replays a trace does what the recorded model did."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mars.checkpoint import Checkpoint
from mars.decoding.generate import prepare, run
from mars.decoding.loop import decode
from mars.decoding.options import DecodingOptions
from mars.decoding.request import Result
from mars.gated import GatedAdapter, GatedConfig
from tests.conftest import make_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEW_TOKENS = 40


@pytest.fixture(scope="module", autouse=True)
def _scripts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


def options(**overrides: Any) -> DecodingOptions:
    return DecodingOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True, **overrides)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[40 + (start + 3 * i) % 32 for i in range(5 + 7 * start)] for start in range(4)]


@pytest.fixture(scope="module")
def traces(headed_drafter: Checkpoint, prompts: list[list[int]]) -> dict[str, Any]:
    from record_acceptance import record

    made = [record(headed_drafter, prepare(headed_drafter, p, options())) for p in prompts]
    return {str(number): trace for number, trace in enumerate(made)}


def what_happened(result: Result) -> dict[str, Any]:
    return {
        "token_ids": result.token_ids,
        "plans": result.plans,
        "histogram": result.acceptance_histogram,
        # Confidences differ in the last bits: they come from forwards of other shapes.
        "outcomes": [(o.offset, o.is_right) for o in result.draft_outcomes],
    }


def random_model(vocabulary: int = 260) -> Any:
    model = make_model("qwen2", seed=7, vocab_size=vocabulary)
    config = GatedConfig(
        base=None,
        fingerprint="",
        block_size=4,
        rank=2,
        targets=("q_proj",),
        mask_embeddings=4,
        head_width=8,
    )
    for parameter in GatedAdapter(model, config).parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def replayed(model: Any, traces: dict[str, Any], rows: int, settings: DecodingOptions) -> list:
    from replay import replay

    requests = [t.request(name, settings, lambda ids: "") for name, t in traces.items()]
    with replay(traces) as steps:
        events = list(decode(model, requests, batch_size=rows))
    results = {e.index: e.result for e in events if e.result is not None}
    assert sum(step.rows for step in steps) == sum(r.forwards for r in results.values())
    return [results[index] for index in range(len(requests))]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layout", ["linear", "partial", "full"])
def test_a_random_model_does_what_the_recorded_one_did(
    headed_drafter: Checkpoint,
    prompts: list[list[int]],
    traces: dict[str, Any],
    layout: Any,
    rows: int,
) -> None:
    settings = options(layout=layout)
    requests = [prepare(headed_drafter, prompt, settings) for prompt in prompts]
    events = run(headed_drafter, requests, batch_size=rows)
    real = {event.index: event.result for event in events if event.result is not None}
    found: list[Result] = replayed(random_model(), traces, rows, settings)
    assert sum(sum(r.acceptance_histogram[2:]) for r in found) > 20
    for index, result in enumerate(found):
        assert what_happened(result) == what_happened(real[index])


def test_ar_and_the_planner_say_the_same(traces: dict[str, Any]) -> None:
    for mode in ("ar", "exact"):
        for result, trace in zip(
            replayed(random_model(), traces, 2, options(mode=mode)), traces.values(), strict=True
        ):
            assert result.token_ids == trace.answer
            assert (result.tokens_per_forward > 1) == (mode == "exact")


def test_the_model_computes_all_the_same(traces: dict[str, Any]) -> None:
    """Nothing is left out: every forward feeds what it is told, and is decided on."""
    from replay import replay

    from mars.decoding import scheduler

    seen: list[int] = []
    model, decided = random_model(), scheduler.decide_outputs
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits.shape[1]))
    with replay(traces) as steps:
        (*_, last) = decode(
            model, [traces["1"].request("1", options(layout="full"), lambda ids: "")]
        )
    assert last.result is not None
    assert len(seen) == len(steps) == last.result.forwards
    assert seen == [step.columns for step in steps]
    assert scheduler.decide_outputs is decided


def test_traces_survive_a_file(traces: dict[str, Any], tmp_path: Path) -> None:
    from replay import read_traces, write_traces

    write_traces(tmp_path / "traces.json", list(traces.values()), {"what": "a test"})
    found, about = read_traces(tmp_path / "traces.json")
    assert about == {"what": "a test"}
    for mine, theirs in zip(found, traces.values(), strict=True):
        assert (mine.prompt, mine.answer) == (theirs.prompt, theirs.answer)
        for drafts, expected in zip(mine.drafts, theirs.drafts, strict=True):
            assert [d.token for d in drafts] == [d.token for d in expected]
            confidences = torch.tensor([[d.confidence for d in x] for x in (drafts, expected)])
            torch.testing.assert_close(confidences[0], confidences[1], atol=5.1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["linear", "partial"])
def test_what_is_recorded_is_worth_what_it_was(layout: Any) -> None:
    from record_acceptance import DEFAULT_FILE
    from replay import read_traces

    traces, about = read_traces(DEFAULT_FILE)
    assert DEFAULT_FILE.stat().st_size < 100_000
    model = random_model(vocabulary=49152)
    settings = DecodingOptions(max_new_tokens=len(traces[0].answer), layout=layout)
    names = {str(number): trace for number, trace in enumerate(traces)}
    rates = [r.tokens_per_forward for r in replayed(model, names, len(traces), settings)]
    # Confidences are rounded, so that now and then another group is left out.
    assert rates == pytest.approx(about["tokens_per_forward"][layout], rel=0.05)
    assert sum(rates) == pytest.approx(sum(about["tokens_per_forward"][layout]), rel=0.005)
