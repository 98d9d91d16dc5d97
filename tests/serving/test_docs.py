"""The examples of the documentation, with a tiny model in place of the default one."""

import re
from pathlib import Path
from typing import Any

import pytest

import mars
from mars.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    (page.name, block)
    for page in (ROOT / "README.md", ROOT / "docs" / "engine.md")
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if "Engine" in block
]


@pytest.mark.parametrize(("page", "block"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_examples_run(
    llama: Checkpoint,
    page: str,
    block: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mars, "load", lambda: llama)
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out


def test_there_are_examples() -> None:
    assert [page for page, _ in EXAMPLES] == ["README.md", "engine.md", "engine.md"]
