"""`benchmarks/gpu.py` does on tiny shapes, on the CPU, all that it does on a GPU."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_all_of_it_on_tiny_shapes(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "gpu.py", tmp_path, "--device", "cpu", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["skipped"] == report["failed"] == report["inexact"] == []

    cells = {(cell["rows"], cell["way"]): cell for cell in report["cells"]}
    ways = {"hf", "hf-static", "ar", "exact", "exact-linear", "exact-partial"}
    assert set(cells) == {(rows, way) for rows in (1, 2) for way in ways} | {(1, "hf-lookup")}
    for (rows, way), cell in cells.items():
        assert cell["runs_done"] == 1
        assert cell["runs"][0]["tokens"] == 16 * rows
        assert cell["tokens_per_s"] > 0
        assert 0 < cell["first_token_s"] < cell["runs"][0]["seconds"]
        if way != "exact":  # which does what pays
            assert (cell["tokens_per_forward"] > 1.3) == way.startswith("exact-")
    assert cells[2, "ar"]["ratio_to_ar"] == 1
    assert cells[1, "ar"]["columns_per_row"] == 1
    assert (
        cells[1, "exact-partial"]["columns_per_row"] > cells[1, "exact-linear"]["columns_per_row"]
    )

    compared = report["exactness"]
    assert {c["model"] for c in compared} == {"qwen2", "phi3", "tiny"}
    assert {c["equal"] for c in compared if c["dtype"] == "float32"} == {1.0}
    # Right drafts were among those that were tried, or nothing was shown.
    assert all(c["tokens_per_forward"] > 1.2 for c in compared if c["way"].startswith("exact"))
    assert {c["reference"] for c in compared if c["dtype"] == "bfloat16"} == {"ar"}

    table = (tmp_path / "gpu.md").read_text()
    assert table.count("| tiny | 2 | ") == len(ways) + 1  # and one line of costs
    assert done.stdout.strip() == table.strip()


def test_what_does_not_fit_or_fails_is_listed(tmp_path: Path) -> None:
    import gpu
    import gpu_report

    report = gpu_report.Report(tmp_path, {"device": "none"}, {"budget": 20, "batches": [1]})
    session = gpu.Session(Namespace(device="cpu", budget=20), report)
    assert session.attempt("run", lambda: 7, shape="s", rows=1, way="ar", round=1) == 7
    assert session.attempt("run", lambda: 1 / 0, shape="s", rows=4, way="ar", round=1) is None
    assert session.attempt("exactness", lambda: 7, shape="s") is None  # takes 30 s, it is guessed
    for rows in (1, 8):  # compiles: guessed to take 100 s
        labels = {"shape": "s", "rows": rows, "way": "hf-compiled", "round": 1}
        assert session.attempt("run", lambda: 7, **labels) is None
    assert report.skipped[0] == {"stage": "exactness", "shape": "s"}
    assert [labels["rows"] for labels in report.skipped[1:]] == [1, 8]
    (failed,) = report.failed
    assert failed["error"].startswith("ZeroDivisionError")
    text = report.markdown()
    assert "* stage exactness, shape s\n" in text
    assert "way hf-compiled, round 1: rows [1, 8]\n" in text
    assert "ZeroDivisionError" in text


def test_ratios_pair_the_runs_of_a_round(tmp_path: Path) -> None:
    from gpu_report import summary
    from gpu_ways import Run

    def run(seconds: float) -> Run:
        return Run(
            seconds=seconds,
            tokens=100,
            forwards=10,
            row_forwards=50,
            first_token_s=0.1,
            step_s=None,
            columns=None,
            peak_bytes=None,
        )

    runs = {
        ("m", 1, "hf"): {0: run(1.0), 1: run(4.0), 2: run(2.0)},
        ("m", 1, "ar"): {0: run(0.5), 1: None, 2: run(0.5)},
    }
    found = summary(runs, ("m", 1, "ar"))
    assert found["ratio_to_hf"] == 3.0  # of 2 and 4; the second round has no pair
    assert found["ratio_to_ar"] == 1.0
    assert found["tokens_per_forward"] == 2.0
    assert found["runs_done"] == 2
    assert found["step_s"] is None
    assert summary({("m", 1, "x"): {0: None}}, ("m", 1, "x"))["tokens_per_s"] is None
