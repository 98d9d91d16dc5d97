"""llama.cpp in an interpreter of its own, so that its packages and ours never meet."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("llama_worker.py")


class LlamaProcess:
    """A running `llama_worker.py`.

    Attributes:
        version: of llama-cpp-python.
    """

    def __init__(self, gguf: Path, *, python: str, threads: int, context: int) -> None:
        """Start it.

        Args:
            gguf: the model.
            python: interpreter that can import `llama_cpp`.
            threads: for prompts and for single tokens.
            context: tokens to make room for.

        Raises:
            SystemExit: the interpreter, its package or the model cannot be used.
        """
        command = [python, str(WORKER), str(gguf), str(threads), str(context)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise SystemExit(f"Cannot start {python}: {error}. Correct --llama-python.") from error
        self.version: str = self._read()["version"]

    def generate(
        self, token_ids: list[int], max_new_tokens: int, end_ids: Iterable[int]
    ) -> tuple[list[int], list[float]]:
        """Decode greedily; return the tokens, and the seconds after which each came."""
        answer = self._ask(
            token_ids=token_ids, max_new_tokens=max_new_tokens, end_ids=sorted(end_ids)
        )
        return answer["token_ids"], answer["times"]

    def peak_bytes(self) -> int:
        """Return the most memory that the process has taken so far."""
        return self._ask(peak=True)["peak_bytes"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it has ended; see above"}
        if "error" in answer:
            raise SystemExit(f"llama.cpp: {answer['error']}.")
        return answer
