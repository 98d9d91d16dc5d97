"""A tiny data set, a tiny model on disk, and a way to run a few training steps."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mars.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def tiny_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Checkpoint]
) -> str:
    """Save a plain two-layer AR model."""
    checkpoint = tiny_checkpoint("llama")
    checkpoint.mars = None
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint.save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write 40 questions with answers of very different lengths."""
    rng = random.Random(0)
    path: Path = tmp_path_factory.mktemp("data") / "data.jsonl"
    with path.open("w") as file:
        for i in range(40):
            answer = " ".join(
                rng.choice(["one", "two", "three"]) for _ in range(rng.randint(1, 12))
            )
            file.write(json.dumps({"question": f"Number {i}?", "answer": answer}) + "\n")
    return str(path)


@pytest.fixture
def options(tiny_folder: str, tiny_data: str, tmp_path: Path) -> list[str]:
    """Flags every test run shares: three optimiser steps of four examples, float32."""
    return [
        f"--model={tiny_folder}",
        f"--data={tiny_data}",
        f"--output_dir={tmp_path / 'run'}",
        "--max_steps=3",
        "--per_device_train_batch_size=4",
        "--learning_rate=1e-2",
        "--lr_scheduler_type=constant",
        "--warmup_steps=0",
        "--probe_size=4",
        "--probe_steps=100",
        "--logging_steps=1",
        "--save_strategy=no",
        "--save_dtype=float32",
        "--disable_tqdm=True",
    ]
