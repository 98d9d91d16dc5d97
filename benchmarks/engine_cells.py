"""Measured cells: all ways on one set of prompts, with one batch size and precision.

A cell holds, way by way and group by group, the raw figures: the seconds of the group and, of
every request, its tokens, the times of the first and the last of them (`engine_ways.Answer`), its
forwards, and a digest of what was said.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_ways import Answer, Run

Cell = dict[str, list[dict[str, Any]]]
"""Way -> groups."""


def measure(
    ways: dict[str, Run],
    groups: Sequence[Sequence[list[int]]],
    *,
    batch_size: int,
    max_new_tokens: int,
) -> Cell:
    """Let every way answer every group, in turns.

    A group is answered batch by batch, and the next batch is handed over when all of one have
    ended, to our own ways too, which could do better than that. A warm-up comes first, of the
    longest prompts and in full: whoever needs more memory than was touched before pays for others.
    In every second group the ways come in reverse order.
    """
    longest = sorted((prompt for group in groups for prompt in group), key=len)[-batch_size:]
    for name, run in ways.items():
        print(f"  warm-up: {name}", file=sys.stderr)
        run(longest, max_new_tokens)
    cell: Cell = {name: [] for name in ways}
    for number, group in enumerate(groups, start=1):
        for name, run in list(ways.items())[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            answers: list[Answer] = []
            for first in range(0, len(group), batch_size):
                answers += run(group[first : first + batch_size], max_new_tokens)
            seconds = time.perf_counter() - started
            cell[name].append(_record(answers, seconds))
            speed = sum(len(answer.token_ids) for answer in answers) / seconds
            print(f"  group {number}: {name} {speed:.1f} tokens/s", file=sys.stderr)
    return cell


def _record(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 6),
        "tokens": [len(answer.token_ids) for answer in answers],
        "first_s": [round(answer.first_s, 6) for answer in answers],
        "last_s": [round(answer.last_s, 6) for answer in answers],
        "forwards": [answer.forwards for answer in answers],
        "digests": [digest(answer.token_ids) for answer in answers],
    }


def digest(token_ids: Sequence[int]) -> str:
    """Return a short name of an answer, to compare it with others."""
    return hashlib.sha256(repr(list(token_ids)).encode()).hexdigest()[:12]


class Store:
    """A JSON file of cells, written after each, so that an interrupted run can go on."""

    def __init__(
        self, path: Path | None, environment: dict[str, Any], arguments: dict[str, Any]
    ) -> None:
        """Read the file if it is there; without a path keep everything in memory.

        Raises:
            SystemExit: the file holds something else, or was measured in another way.
        """
        self._path = path
        arguments = json.loads(json.dumps(arguments))
        self.content: dict[str, Any] = {
            "environment": environment,
            "arguments": arguments,
            "cells": {},
        }
        if path is None or not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            parts = {name: found[name] for name in self.content}
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} holds no results of this benchmark ({error}).") from error
        for part in ("arguments", "environment"):
            _refuse_other(path, part, parts[part], self.content[part])
        self.content = parts

    def __contains__(self, key: str) -> bool:
        return key in self.content["cells"]

    def __getitem__(self, key: str) -> Any:
        return self.content["cells"][key]

    def __setitem__(self, key: str, cell: Any) -> None:
        self.content["cells"][key] = cell
        if self._path is None:
            return
        partial = self._path.with_name(self._path.name + ".part")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(partial, self._path)


def _refuse_other(path: Path, part: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    changes = [
        f"{name} was {found.get(name)!r} and is {wanted.get(name)!r}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
    if changes:
        raise SystemExit(
            f"{path} was measured with another {part.removesuffix('s')}: {'; '.join(changes)}. "
            "Name another --json file, or delete this one."
        )
