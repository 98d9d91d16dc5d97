"""`benchmarks/engine.py`: the same answers by all ways, figures counted by hand, resumed runs."""

import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import engine_memory
import pytest
import torch
from engine_cells import Store, measure
from engine_report import _draw, markdown, plot, spread_of, summarise
from engine_ways import STOCK, Answer, Workbench, is_way
from llama_client import LlamaProcess
from matplotlib.figure import Figure
from prompts import groups_of, spread

from mars.checkpoint import Checkpoint
from mars.decoding.generate import generate
from mars.engine.cache import SlotCache

PROMPTS = [[40, 41, 42, 43, 41, 42], [7, 9, 200], [30, 31, 32, 33, 34, 30, 31, 32]]


@pytest.fixture(scope="session")
def llama(tiny_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    return tiny_checkpoint("llama")


@pytest.fixture
def bench(llama: Checkpoint) -> Workbench:
    """One whose models are there already."""
    bench = Workbench(model=None, adapter="none", dtype="float32")
    bench.__dict__ |= {"ours": llama, "stock": llama}
    return bench


@pytest.mark.parametrize("name", ["ar", "exact", "transformers", "transformers-static"])
@pytest.mark.parametrize("budget", [1, 40])
def test_ways_say_what_ar_says(bench: Workbench, llama: Checkpoint, name: str, budget: int) -> None:
    # 40 tokens are enough for end tokens, and for a gap between the rows' lengths.
    expected = generate(llama, PROMPTS, mode="ar", max_new_tokens=budget)
    answers = bench.way(name)(PROMPTS, budget)
    assert [answer.token_ids for answer in answers] == [r.token_ids for r in expected]
    for answer in answers:
        is_single = len(answer.token_ids) == 1
        assert 0 < answer.first_s <= answer.last_s
        assert (answer.first_s < answer.last_s) is not is_single
        assert (answer.forwards is None) is (name in STOCK)


@pytest.mark.parametrize("name", ["transformers-lookup"])
def test_ways_of_batch_size_one_say_what_ar_says(
    bench: Workbench, llama: Checkpoint, name: str
) -> None:
    expected = generate(llama, PROMPTS, mode="ar", max_new_tokens=40)
    for prompt, result in zip(PROMPTS, expected, strict=True):
        (answer,) = bench.way(name)([prompt], 40)
        assert answer.token_ids == result.token_ids


def test_block_caches_are_ways(bench: Workbench) -> None:
    assert is_way("block-cache-7")
    assert not is_way("block-cache-x")
    assert not is_way("block-cache-0")
    for name in ("block-cache", "block-cache-2"):
        assert len(bench.way(name)(PROMPTS, 5)) == 3


def test_options_reach_our_ways(bench: Workbench) -> None:
    greedy = bench.way("ar")(PROMPTS, 12)
    sampled = bench.way("ar", temperature=2.0)(PROMPTS, 12)
    drafted = bench.way("exact", temperature=2.0)(PROMPTS, 12)
    assert [a.token_ids for a in sampled] != [a.token_ids for a in greedy]
    assert [a.token_ids for a in sampled] == [a.token_ids for a in drafted]


def slow(name: str, seconds: float) -> Callable[..., list[Answer]]:
    """A way with made-up times: one token at once, then one every `seconds`."""

    def run(prompts: list[list[int]], max_new_tokens: int) -> list[Answer]:
        return [
            Answer(
                token_ids=[*range(max_new_tokens)] if name == "ar" else [*prompts[0], 1],
                first_s=1.0,
                last_s=1.0 + seconds * (max_new_tokens - 1),
                forwards=2,
            )
            for _ in prompts
        ]

    return run


def test_figures_are_those_counted_by_hand() -> None:
    ways = {"ar": slow("ar", 0.5), "exact": slow("exact", 0.25)}
    cell = measure(ways, [[[0, 1]] * 4, [[5, 6]] * 4], batch_size=2, max_new_tokens=3)
    assert [len(groups) for groups in cell.values()] == [2, 2]
    for name, seconds in (("ar", [3.0, 6.0]), ("exact", [1.5, 1.5])):
        for group, taken in zip(cell[name], seconds, strict=True):
            group["seconds"] = taken
    figures = summarise(cell)
    assert figures["ar"]["tokens_per_s"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert figures["exact"]["ratio_to"]["ar"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert figures["exact"]["ratio_to"]["exact"]["median"] == 1
    assert figures["ar"]["ttft_ms"] == {"p50": 1000, "p95": 1000}
    assert figures["ar"]["tpot_ms"] == {"p50": 500, "p95": 500}
    assert figures["exact"]["tpot_ms"] == {"p50": 250, "p95": 250}
    assert figures["ar"]["tokens_per_forward"] == 1.5
    # [0, 1, 1] is not [0, 1, 2].
    assert (figures["ar"]["same_as_ar"], figures["exact"]["same_as_ar"]) == (1, 0)


def test_no_way_is_always_the_first() -> None:
    calls: list[tuple[str, int]] = []

    def note(name: str) -> Callable[..., list[Answer]]:
        def run(prompts: list[list[int]], max_new_tokens: int) -> list[Answer]:
            calls.append((name, len(prompts[-1])))
            return slow(name, 0.1)(prompts, max_new_tokens)

        return run

    measure(
        {"ar": note("ar"), "exact": note("exact")},
        [[[1]], [[1, 2, 3]], [[1, 2]]],
        batch_size=1,
        max_new_tokens=4,
    )
    assert calls[:2] == [("ar", 3), ("exact", 3)], "the warm-up has the longest prompt"
    assert [name for name, _ in calls[2:]] == ["ar", "exact", "exact", "ar", "ar", "exact"]


def test_groups_are_spread_over_a_set() -> None:
    assert spread([*range(10)], 5) == [0, 2, 4, 6, 8]
    assert groups_of([*range(12)], 3, 2) == [[0, 6], [2, 8], [4, 10]]
    for group in groups_of([*range(6)], 5, 4):  # 20 of 6
        assert len(set(group)) == 4


def test_a_store_goes_on_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Store(path, {"cores": 2}, {"groups": 5})["a"] = {"x": 1}
    again = Store(path, {"cores": 2}, {"groups": 5})
    assert "a" in again
    assert again["a"] == {"x": 1}
    assert "b" not in again
    with pytest.raises(SystemExit, match="another argument: groups was 5 and is 4"):
        Store(path, {"cores": 2}, {"groups": 4})
    with pytest.raises(SystemExit, match="another environment: cores was 2 and is 3"):
        Store(path, {"cores": 3}, {"groups": 5})
    path.write_text("[]")
    with pytest.raises(SystemExit, match="no results of this benchmark"):
        Store(path, {}, {})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    lines = "\n".join(json.dumps({"question": f"How many? {i}"}) for i in range(7))
    (folder / "gsm8k_test.jsonl").write_text(lines)
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "def f():"}))
    chat = {"instruction": "Say something.", "instances": [{"input": ""}]}
    (folder / "user_oriented_instructions.jsonl").write_text(json.dumps(chat))
    return folder


def test_the_command_resumes_and_prints_tables(
    data: Path,
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("engine_ways.load", lambda *_, **__: llama)
    command = ["engine.py", str(data), "--quick", "--memory-batch-sizes", "--json"]
    command += [str(data / "out.json"), "--max-new-tokens", "6", "--ways", "ar", "exact"]
    monkeypatch.setattr(sys, "argv", [*command, "transformers", "transformers-lookup"])
    engine.main()
    printed = capsys.readouterr().out
    assert "### bfloat16, gsm8k, batch size 4" in printed
    assert "| `exact` / `transformers-lookup` |" in printed
    written = json.loads((data / "out.json").read_text())
    cells = written["cells"]
    assert len(cells) == 6
    assert list(cells["bfloat16/adversarial/1"]["groups"]) == ["ar", "exact"]
    assert "transformers-lookup" not in cells["bfloat16/gsm8k/4"]["groups"]
    assert str(data) not in json.dumps(written["arguments"])
    assert (data / "out.svg").read_text().startswith("<?xml")
    # What is there is not measured again.
    monkeypatch.setattr("engine.measure", None)
    engine.main()
    assert capsys.readouterr().out == printed


def made_up_cells() -> dict[str, Any]:
    """Two precisions, one of them with one set only; other ways at other batch sizes."""
    speeds = {
        "bfloat16/gsm8k/1": {"exact": [110, 120, 125], "ar": [70, 75, 80], "llama.cpp": [126]},
        "bfloat16/gsm8k/32": {"exact": [700, 750], "ar": [720], "block-cache-16": [361, 362]},
        "bfloat16/chat/1": {"exact": [140], "block-cache-7": [55]},
        "float32/gsm8k/1": {"exact": [29, 30]},
    }
    cells: dict[str, Any] = {"bfloat16/memory/1": {"ar": {"peak_bytes": 3 << 20}}}
    for key, ways in speeds.items():
        summary = {way: {"tokens_per_s": spread_of(values)} for way, values in ways.items()}
        cells[key] = {"summary": summary}
    return cells


def test_a_plot_names_what_it_shows(tmp_path: Path) -> None:
    cells = made_up_cells()
    plot(cells, tmp_path / "plot.svg")
    written = (tmp_path / "plot.svg").read_text()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", written)
    assert {"exact", "ar", "llama.cpp", "block-cache-7", "block-cache-16"} <= set(texts)
    assert {"gsm8k, bfloat16", "chat, bfloat16", "gsm8k, float32"} <= set(texts)
    assert {"tokens per second", "batch size", "1", "32", "100"} <= set(texts), "plain numbers"
    assert "transformers" not in texts, "not measured"
    assert texts.count("exact") == 1, "one legend for all panels"
    plot(cells, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == written
    plot(cells, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    plot({"bfloat16/memory/1": {}}, tmp_path / "empty.svg")
    assert not (tmp_path / "empty.svg").exists()


def test_a_plot_shows_median_smallest_and_largest() -> None:
    """Ways stand beside each other, in the order of the legend, so that bars hide no others."""
    axis, summary = Figure().subplots(), made_up_cells()["bfloat16/gsm8k/1"]["summary"]
    handles = _draw(axis, {1: summary}, ["ar", "exact", "llama.cpp"])
    drawn = {}
    for way, (points, _, (bar,)) in handles.items():
        (x,), (y,) = points.get_data()
        drawn[way] = (x, y, *bar.get_segments()[0][:, 1])
    assert drawn["ar"][1:] == (75, 70, 80)
    assert drawn["exact"][1:] == (120, 110, 125)
    assert 0.9 < drawn["ar"][0] < drawn["exact"][0] < drawn["llama.cpp"][0] < 1.1


def test_a_plot_without_matplotlib_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"mars-lm\[benchmarks\]"):
        plot({}, tmp_path / "x.svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--ways", "nonsense"], "no way 'nonsense'"), (["--ways", "llama.cpp"], "needs --gguf")],
)
def test_refuses_ways_it_does_not_have(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        engine.parse_arguments(["data", *words])
    assert message in capsys.readouterr().err


def test_memory_of_a_cache_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SlotCache(2, 9)
    cache.allocate(num_layers=3, heads=2, width=4, dtype=torch.bfloat16)
    answers = [Answer(token_ids=[1] * n, first_s=1, last_s=1) for n in (1, 4)]
    slot = 3 * 2 * 2 * 4 * 2  # layers, keys and values, heads, width, bytes
    assert engine_memory.describe_cache(cache, [[1, 2], [1, 2, 3]], answers) == {
        "cache_bytes": 2 * 10 * slot,
        "text_bytes": (3 + 7) * slot,
        "rows_bytes": 2 * 7 * slot,
    }
    cells: dict[str, Any] = {"float32/memory/2": {"ar": {"peak_bytes": 3 << 20}}}
    assert "| float32 | 2 | ar | 3 | - | - | - | - |" in markdown(cells)


@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own() -> None:
    settings = {"model": None, "adapter": "auto", "dtype": "bfloat16", "gguf": None}
    job = engine_memory.Job(
        workbench=settings, way="exact", threads=1, prompts=PROMPTS[:2], max_new_tokens=3
    )
    taken = engine_memory.measure_memory(job)
    assert taken["peak_bytes"] > taken["weight_bytes"] > 2 * 134_000_000
    # Two rows; 30 layers with 3 key-value heads of 64, bfloat16.
    assert taken["rows_bytes"] == 2 * 9 * (30 * 2 * 3 * 64 * 2)
    assert taken["cache_bytes"] >= taken["rows_bytes"] >= taken["text_bytes"]


FAKE_LLAMA = """
__version__ = "0.0"
class Llama:
    def __init__(self, path, **settings):
        print("noise")
        assert settings["n_threads"] == settings["n_threads_batch"] == 2
    def reset(self):
        self.is_reset = True
    def generate(self, tokens, **settings):
        assert self.is_reset and settings == {"temp": 0.0, "repeat_penalty": 1.0}
        self.is_reset = False
        while True:
            yield tokens[-1]
            tokens[-1] += 1
"""


def test_llama_runs_in_its_own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = LlamaProcess(tmp_path / "x.gguf", python=sys.executable, threads=2, context=64)
    assert process.version == "0.0"
    for _ in range(2):
        ids, times = process.generate([5, 6], 10, {8})
        assert ids == [6, 7, 8]
        assert len(times) == 3
        assert times == sorted(times)
    assert process.generate([5, 6], 2, {8})[0] == [6, 7]
    assert process.peak_bytes() > 1 << 20
    process.close()


def test_a_missing_llama_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('it is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"llama\.cpp: ImportError: it is broken"):
        LlamaProcess(tmp_path / "x.gguf", python=sys.executable, threads=2, context=64)
    with pytest.raises(SystemExit, match="Correct --llama-python"):
        LlamaProcess(tmp_path, python=str(tmp_path / "python"), threads=2, context=64)
