"""An engine's checkpoint, and a gate that holds its thread where a test wants it."""

import threading
from collections.abc import Callable

import pytest
import torch

from mars.checkpoint import Checkpoint

PATIENCE = 120  # seconds until a test gives up; machines may be slow


@pytest.fixture(scope="session")
def llama(tiny_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    return tiny_checkpoint("llama")


class Gate:
    """A logits hook that holds the engine's thread when `after` tokens have been said."""

    def __init__(self, prompt_tokens: int, after: int = 0) -> None:
        self._length = prompt_tokens + after
        self._is_reached = threading.Event()
        self._is_open = threading.Event()

    def __call__(self, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == self._length:
            self._is_reached.set()
            assert self._is_open.wait(PATIENCE)
        return logits

    def wait(self) -> None:
        """Return once the thread stands at the gate."""
        assert self._is_reached.wait(PATIENCE)

    def open(self) -> None:
        self._is_open.set()
