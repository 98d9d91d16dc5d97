"""Record what the default model's drafts are worth, for the replay of `benchmarks/gpu.py`.

    python benchmarks/record_acceptance.py DATA

DATA holds gsm8k_test.jsonl. Prompts of 140 tokens and more whose answers are long enough are taken
evenly from it; the answers are those of `ar`, one token per forward, each forward with a group of
masks behind it. Those whose tokens per forward (layout partial) lie nearest to the mean come first
in the file, so that a short benchmark meets ordinary ones. `benchmarks/acceptance.json` has the
result: token ids of questions of GSM8K (MIT licence) and of answers of the model.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from replay import Trace, write_traces

from mars import load
from mars.checkpoint import Checkpoint
from mars.decoding.generate import prepare, run
from mars.decoding.options import DecodingOptions, Layout
from mars.decoding.plain import decide_outputs
from mars.decoding.plan import RowPlan
from mars.decoding.request import Progress, Request
from mars.decoding.step import StepParams
from mars.engine.runner import Runner
from mars.evaluation.environment import describe_environment

DEFAULT_FILE = Path(__file__).parent / "acceptance.json"
LAYOUTS: tuple[Layout, ...] = ("linear", "partial")


def record(checkpoint: Checkpoint, request: Request) -> Trace | None:
    """Decode greedily, with a group of masks in every forward; None if the answer ends early."""
    model, window = checkpoint.model, request.window
    runner = Runner(
        model,
        num_rows=1,
        max_positions=len(request.prompt_ids) + request.options.max_new_tokens + window + 1,
        mask_token_id=checkpoint.mask_token_id,
    )
    runner.add_row()
    progress = Progress(request)
    drafts, plan = [[]], RowPlan()  # the prompt is read without masks, as in the exact mode
    while not progress.is_finished:
        outputs = runner.run(0, [progress.tokens], [plan])
        params = StepParams.of([request], outputs[0].shape[-1], outputs[0].device)
        (decision,) = decide_outputs(
            *(outputs, model, [progress], [plan], params, []), checkpoint.mask_token_id
        )
        progress.commit(decision.tokens)
        drafts.append(decision.drafts)
        plan = RowPlan(groups=(0,), window=window)
    if progress.stop.finish_reason != "length":
        return None
    return Trace(request.prompt_ids, progress.tokens[len(request.prompt_ids) :], drafts)


def candidates(
    checkpoint: Checkpoint, questions: Sequence[str], options: DecodingOptions, lengths: range
) -> Iterator[Request]:
    """Yield requests of the questions whose prompts have a length in `lengths`, well mixed."""
    count = len(questions)
    for number in range(count):
        question = questions[number * 509 % count]  # 509 is prime: goes through all of them
        request = prepare(checkpoint, question, options)
        if len(request.prompt_ids) in lengths:
            yield request


def tokens_per_forward(
    checkpoint: Checkpoint, traces: Sequence[Trace], layout: Layout
) -> list[float]:
    """Decode the same prompts for real, which must give the same answers."""
    rates = []
    for trace in traces:
        options = DecodingOptions(layout=layout, max_new_tokens=len(trace.answer))
        (*_, last) = run(checkpoint, [prepare(checkpoint, trace.prompt, options)])
        if last.result is None or last.result.token_ids != trace.answer:
            raise SystemExit("The exact mode has not said what ar says: nothing can be recorded.")
        rates.append(last.result.tokens_per_forward)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--model", help="hub id or folder; the default model if left out")
    parser.add_argument("--traces", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[140, 260])
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()

    checkpoint = load(args.model, dtype=args.dtype)
    lines = (args.data / "gsm8k_test.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    options = DecodingOptions(max_new_tokens=args.max_new_tokens)
    traces: list[Trace] = []
    for request in candidates(checkpoint, questions, options, range(*args.prompt_tokens)):
        if (trace := record(checkpoint, request)) is not None:
            traces.append(trace)
            print(f"{len(traces)} of {args.traces}", file=sys.stderr, flush=True)
        if len(traces) == args.traces:
            break
    rates = {layout: tokens_per_forward(checkpoint, traces, layout) for layout in LAYOUTS}
    # All answers are of the same length, so this is their tokens per all their forwards.
    means = {layout: statistics.harmonic_mean(values) for layout, values in rates.items()}
    order = sorted(range(len(traces)), key=lambda i: abs(rates["partial"][i] - means["partial"]))
    about = {
        "what": "answers of the default model and the drafts of its masks (benchmarks/replay.py)",
        "model": checkpoint.name,
        "tokens_per_forward": {
            layout: [round(rates[layout][i], 4) for i in order] for layout in LAYOUTS
        },
        "environment": describe_environment(),
    }
    write_traces(args.out, [traces[i] for i in order], about)
    print(json.dumps({layout: round(mean, 3) for layout, mean in means.items()}))


if __name__ == "__main__":
    main()
