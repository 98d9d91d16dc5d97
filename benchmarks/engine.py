"""The engine against what else there is, on one machine: speed, latency and memory.

    python benchmarks/engine.py DATA --json engine.json [--gguf FILE --llama-python PYTHON]

DATA is the folder that `prompts.read_prompts` reads. Everything is decoded greedily, but for the
set `adversarial`. The ways:

    ar, exact, threshold     `mars.generate` with the mode of that name, all options as they are,
                             tau = 0.9
    block-cache              the paper's batches, `mars.baselines.block_cache`, with the same tau,
                             blocks of the trained size; block-cache-16: with blocks of 16 tokens
    transformers, -static    `generate` with its dynamic and its static cache
    transformers-lookup      its prompt lookup, batch size 1 only, as the next two
    transformers-early-exit  its assisted decoding; the first layers of the model are the assistant.
                             Slower than anything else, so on gsm8k only
    llama.cpp                llama-cpp-python on a GGUF, which for the default model is the file it
                             was converted from (in the wheel that `mars.default_model` names)

For every precision, batch size and set, the ways take turns, group by group of prompts, and
ratios are taken within a group: median, and smallest to largest. Tokens after the end of an answer
do not count, and reading the prompts is part of the time. What starts and stops the clocks is said
in `engine_ways.py`; the time per token of a request is (last - first) / (tokens - 1), so that the
first token, with which others may come, is left out.

The set `adversarial` is for `ar` and `exact` only, which must not lose: the chat prompts, sampled
at temperature 2. Of what was tried, its drafts are accepted least: 1.01 tokens per forward, 1 % of
the first drafts. (Greedy answers cannot do that to us: those to random tokens, to "write random
digits" and to "write unrelated words" repeat themselves, at 4 to 5 tokens per forward; the worst of
60 chat prompts has 1.3. At temperature 1.5 it is 1.07.)

Every cell is written to the JSON file as it is done; the same command goes on with what is missing,
and at last prints tables in Markdown and draws a plot (`pip install 'mars-lm[benchmarks]'`). With
--quick all of it takes a few minutes and says nothing.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine_cells import Store, measure
from engine_memory import Job, measure_memory
from engine_report import markdown, plot, summarise
from engine_ways import EARLY_EXIT, LLAMA, ONLY_ALONE, WAYS, Workbench, is_way
from prompts import groups_of, read_prompts

from mars.decoding.prompts import encode
from mars.evaluation.environment import describe_environment

QUICK = {
    "dtypes": ["bfloat16"],
    "batch_sizes": [1, 4],
    "groups": 2,
    "group_prompts": 1,
    "max_new_tokens": 24,
    "memory_batch_sizes": [1],
}
# Where the results are put, and where things lie: nothing that changes a result.
NO_SETTINGS = ("data", "gguf", "llama_python", "json", "plot", "quick")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts, and how to answer them."""

    source: str
    """Set of `read_prompts`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of decoding."""
    only: tuple[str, ...] | None = None
    """The ways that take part; None: all, ..."""
    without: tuple[str, ...] = ()
    """... but these."""


SETS = {
    "gsm8k": PromptSet(source="gsm8k"),
    "chat": PromptSet(source="chat", without=(EARLY_EXIT,)),
    "adversarial": PromptSet(source="chat", options={"temperature": 2.0}, only=("ar", "exact")),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; --quick changes the defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", help="hub id or folder; the default model if left out")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--ways", nargs="+", help="all there are if left out")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument(
        "--group-prompts", type=int, default=2, help="of a group at least, in whole batches"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--memory-batch-sizes", type=int, nargs="*", help="smallest and largest if left out"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gguf", type=Path, help=f"adds the way {LLAMA}")
    parser.add_argument(
        "--llama-python", default=sys.executable, help="interpreter that has llama_cpp"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="beside the JSON file, as SVG, if left out")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few minutes")
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(arguments)
    if args.ways is None:
        args.ways = [way for way in WAYS if way != LLAMA or args.gguf]
    for way in args.ways:
        if not is_way(way):
            parser.error(f"there is no way {way!r}; there are {', '.join(WAYS)}")
    if LLAMA in args.ways and args.gguf is None:
        parser.error(f"the way {LLAMA} needs --gguf FILE")
    if args.memory_batch_sizes is None:
        args.memory_batch_sizes = sorted({min(args.batch_sizes), max(args.batch_sizes)})
    if args.plot is None and args.json is not None:
        args.plot = args.json.with_suffix(".svg")
    return args


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that results depend on, without paths of this machine."""
    settings = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    return settings | {"gguf": args.gguf and args.gguf.name}


def commit() -> str | None:
    """Return the commit of this checkout, `+` behind it if files have changed."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


class Benchmark:
    """All cells of a run, one precision after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._prompts = read_prompts(args.data)
        self._ids: dict[str, list[list[int]]] = {}
        self._context = 0  # of the longest prompt and answer

    def run(self, store: Store) -> None:
        """Measure what the store lacks."""
        for dtype in self._args.dtypes:
            bench = Workbench(**self._settings(dtype))
            for batch_size, name in self._cells():
                key = f"{dtype}/{name}/{batch_size}"
                if key in store:
                    continue
                print(key, file=sys.stderr)
                started = time.perf_counter()
                store[key] = self._speed(bench, name, batch_size)
                print(f"  {time.perf_counter() - started:.0f} s", file=sys.stderr)
            for batch_size in self._args.memory_batch_sizes:
                key = f"{dtype}/memory/{batch_size}"
                if key not in store:
                    print(key, file=sys.stderr)
                    store[key] = self._memory(bench, dtype, batch_size)

    def _cells(self) -> Iterator[tuple[int, str]]:
        for batch_size in self._args.batch_sizes:
            for name in self._args.sets:
                if self._ways(batch_size, SETS[name]):
                    yield batch_size, name

    def _ways(self, batch_size: int, prompts: PromptSet | None = None) -> list[str]:
        ways = [way for way in self._args.ways if batch_size == 1 or way not in ONLY_ALONE]
        if prompts is None:
            return ways
        only = ways if prompts.only is None else prompts.only
        return [way for way in ways if way in only and way not in prompts.without]

    def _settings(self, dtype: str) -> dict[str, Any]:
        args = self._args
        return {
            "model": args.model,
            "adapter": args.adapter,
            "dtype": dtype,
            "gguf": args.gguf,
            "llama_python": args.llama_python,
            "context": self._context,
        }

    def _groups(self, bench: Workbench, name: str, batch_size: int) -> list[list[list[int]]]:
        """Return groups of prompts of a set, as token ids."""
        for source in {SETS[name].source for name in self._args.sets} - set(self._ids):
            texts = self._prompts[source]
            self._ids[source] = ids = [encode(bench.stock.tokenizer, text) for text in texts]
            longest = max(map(len, ids)) + self._args.max_new_tokens
            self._context = max(self._context, longest)
        bench.context = self._context
        batches = -(-self._args.group_prompts // batch_size)
        ids = self._ids[SETS[name].source]
        return groups_of(ids, self._args.groups, batches * batch_size)

    def _speed(self, bench: Workbench, name: str, batch_size: int) -> dict[str, Any]:
        prompts = SETS[name]
        cell = measure(
            {way: bench.way(way, **prompts.options) for way in self._ways(batch_size, prompts)},
            self._groups(bench, name, batch_size),
            batch_size=batch_size,
            max_new_tokens=self._args.max_new_tokens,
        )
        return {"commit": commit(), "summary": summarise(cell), "groups": cell}

    def _memory(self, bench: Workbench, dtype: str, batch_size: int) -> dict[str, Any]:
        """Measure all ways on the first batch of the first set."""
        batch = self._groups(bench, self._args.sets[0], batch_size)[0][:batch_size]
        taken = {}
        for way in self._ways(batch_size):
            job = Job(
                workbench=self._settings(dtype),
                way=way,
                threads=self._args.threads,
                prompts=batch,
                max_new_tokens=self._args.max_new_tokens,
            )
            taken[way] = measure_memory(job)
        return taken


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    environment: dict[str, Any] = describe_environment()
    if LLAMA in args.ways:
        settings = {"model": None, "adapter": "none", "dtype": "float32"}
        llama = Workbench(**settings, gguf=args.gguf, llama_python=args.llama_python).llama
        environment["llama_cpp"] = llama.version
        llama.close()
    store = Store(args.json, environment, settings_of(args))
    print(*(f"{name}: {value}" for name, value in environment.items()), sep="\n")
    print(*(f"{name}: {value}" for name, value in settings_of(args).items()), sep="\n")
    Benchmark(args).run(store)
    cells = store.content["cells"]
    print(f"\n{markdown(cells)}")
    if args.plot is not None:
        plot(cells, args.plot)


if __name__ == "__main__":
    main()
