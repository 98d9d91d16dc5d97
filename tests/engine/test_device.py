"""What a GPU needs of our code, shown without one: the meta device stands in for it.

Tensors there have no values, so a step can run up to the point where its decisions go to the host,
which would fail anywhere earlier; and every operation can be asked where its operands lie.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mars.decoding import step as step_module
from mars.decoding.options import DecodingOptions
from mars.decoding.plan import RowPlan
from mars.decoding.request import Progress, Request
from mars.decoding.sampling import History
from mars.decoding.step import StepParams, decide
from mars.engine.runner import Runner
from mars.gated import GatedAdapter, GatedConfig, all_linear
from tests.conftest import FAMILIES

DEVICE = torch.device("meta")
PROMPTS = [list(range(4, 9)), list(range(4, 13)), list(range(4, 11))]
PLANS = [RowPlan((1, 2, 3), (0, 3), 4), RowPlan(), RowPlan((4,), (1,), 3)]


class Operands(TorchDispatchMode):
    """Count copies between devices; raise where an operation mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        # A tensor without dimensions may lie on the host: it travels as a number.
        devices = {x.device.type for x in tensors if x.dim()}
        if len(devices) > 1:
            assert func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_), (
                f"{func} on {devices}"
            )
            self.copies += 1
        return result


class ReachedHostError(Exception):
    """Raised where the decisions of a step go to the host."""


def to_host_raises(parts: dict[str, torch.Tensor]) -> None:
    assert {part.device.type for part in parts.values()} == {DEVICE.type}
    raise ReachedHostError


def make_model(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family,
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    adapter = GatedConfig(
        base=None,
        fingerprint="",
        block_size=4,
        rank=2,
        targets=all_linear(model),
        mask_embeddings=4,
        head_width=8,
    )
    nn.Module.to(GatedAdapter(model, adapter), torch.bfloat16).requires_grad_(False)
    return model


def rows_of(tokens: list[list[int]], **options: Any) -> list[Progress]:
    rows = []
    for row in tokens:
        request = Request(
            prompt="",
            prompt_ids=row[:-1],
            options=DecodingOptions(**options),
            window=4,
            end_ids=frozenset(),
            decode=lambda ids: "",
        )
        rows.append(Progress(request))
        rows[-1].tokens = list(row)
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_stays_on_the_device_of_the_model(family: str) -> None:
    model = make_model(family)
    runner = Runner(model, num_rows=3, max_positions=64, prefill_chunk=8)
    for _ in PROMPTS:
        runner.add_row()
    with Operands() as operands:
        runner.run(0, PROMPTS, [RowPlan()] * 3)
    assert operands.copies == 2, "one copy a forward: the columns; a prompt is longer than a chunk"
    tokens = [[*prompt, 3] for prompt in PROMPTS]
    with Operands() as operands:
        outputs = runner.run(0, tokens, PLANS)
    assert operands.copies == 1
    assert {x.device for x in (*outputs[:2], outputs[2].hidden_BMD)} == {DEVICE}
    assert {x.device for x in (*runner.cache.keys, *runner.cache.values)} == {DEVICE}
    with Operands() as operands:
        runner.keep(0, [2, 0, 1])
        runner.drop_row(0)
    assert operands.copies == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {3: 1.0}},
        {"logprobs": 3},
        {"mode": "threshold"},
        {"mode": "ar"},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_decisions_stay_there_until_they_go_to_the_host_at_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    runner = Runner(model, num_rows=3, max_positions=64)
    for _ in PROMPTS:
        runner.add_row()
    plans = {"threshold": [RowPlan((), (0,), 4)] * 3, "ar": [RowPlan()] * 3}
    plans = plans.get(options.get("mode", ""), PLANS)
    rows = rows_of(PROMPTS, **options)
    outputs = runner.run(0, PROMPTS, plans)
    params = StepParams.of([row.request for row in rows], 260, DEVICE)
    histories = [History.of(p, 260, DEVICE) for p in PROMPTS] if params.has_penalties else []
    monkeypatch.setattr(step_module, "to_host", to_host_raises)
    with Operands() as operands, pytest.raises(ReachedHostError):
        decide(outputs[0], outputs[1], rows, plans, params, histories, None, outputs[2])
    assert operands.copies <= 1, "one copy: what was fed"
