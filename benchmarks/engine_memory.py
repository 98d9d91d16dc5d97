"""Peak memory of a way: a process of its own answers one batch and says what it has taken.

The peak is that of the whole process, Python and libraries included. For our own ways, beside it:
what the KV cache takes, and what the texts in it would take if no slot were empty.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from engine_ways import LLAMA, Answer, Workbench
from llama_worker import peak_bytes

from mars.engine.cache import SlotCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the process is to do."""

    workbench: dict[str, Any]
    """Arguments of `Workbench`."""
    way: str
    threads: int
    prompts: list[list[int]]
    max_new_tokens: int


def measure_memory(job: Job) -> dict[str, Any]:
    """Run a job in a process of its own.

    Raises:
        SystemExit: the process has failed.
    """
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        input=json.dumps(asdict(job), default=str),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"Measuring the memory of {job.way} has failed; see above.")
    return json.loads(done.stdout.splitlines()[-1])


def run_job(job: Job) -> dict[str, Any]:
    """Answer the batch; return bytes."""
    torch.set_num_threads(job.threads)
    gguf = job.workbench["gguf"]
    bench = Workbench(**job.workbench | {"gguf": Path(gguf) if gguf else None})
    caches = _keep_caches()
    answers = bench.way(job.way)(job.prompts, job.max_new_tokens)
    peak = bench.llama.peak_bytes() if job.way == LLAMA else peak_bytes()
    weights = bench.weight_bytes(job.way)
    # The first is the one of the batch; a planner that measures step times makes others.
    cache = describe_cache(caches[0], job.prompts, answers) if caches else {}
    return {"peak_bytes": peak, "weight_bytes": weights} | cache


def _keep_caches() -> list[SlotCache]:
    """Return a list that will hold every KV cache made from now on: they only grow."""
    kept: list[SlotCache] = []
    make = SlotCache.__init__

    def make_and_keep(cache: SlotCache, *args: Any, **kwargs: Any) -> None:
        make(cache, *args, **kwargs)
        kept.append(cache)

    SlotCache.__init__ = make_and_keep
    return kept


def describe_cache(
    cache: SlotCache, prompts: Sequence[list[int]], answers: Sequence[Answer]
) -> dict[str, int]:
    """Return bytes of the cache, of the texts, and of rows all as long as the longest text."""
    taken = sum(tensor.numel() * tensor.itemsize for tensor in [*cache.keys, *cache.values])
    slot = taken // (cache.num_rows * cache.row_slots)
    lengths = [len(p) + len(a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    return {
        "cache_bytes": taken,
        "text_bytes": sum(lengths) * slot,
        "rows_bytes": len(lengths) * max(lengths) * slot,
    }


if __name__ == "__main__":
    print(json.dumps(run_job(Job(**json.load(sys.stdin)))))
