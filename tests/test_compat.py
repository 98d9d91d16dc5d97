from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import mars.engine.runner  # noqa: F401  (registers the attention function)
from mars.compat import (
    _forward_signature,
    attention_implementation,
    takes_attention_functions,
)
from mars.engine.attention import grouped_attention
from tests.conftest import make_model


def test_attention_and_its_mask_are_registered() -> None:
    assert AttentionInterface()["mars"] is grouped_attention
    assert "mars" in AttentionMaskInterface()


def test_the_implementation_is_restored_even_after_an_error() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    with attention_implementation(model, "mars"):
        assert model.model.layers[0].self_attn.config._attn_implementation == "mars"
    assert model.config._attn_implementation == before
    with pytest.raises(ZeroDivisionError), attention_implementation(model, "mars"):
        _ = 1 / 0
    assert model.config._attn_implementation == before


def test_threads_that_share_a_model_take_turns() -> None:
    """Without that, one would restore what another had set, and a third run with it."""
    model = make_model("llama")
    before = model.config._attn_implementation
    both_inside = Barrier(2)

    def switch(name: str) -> str:
        with attention_implementation(model, name):
            with suppress(BrokenBarrierError):
                both_inside.wait(timeout=0.2)
            return model.config._attn_implementation

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(switch, ["mars", "eager"])) == ["mars", "eager"]
    assert both_inside.broken  # the two were never inside together
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("family", "does"), [("llama", True), ("mpt", False), ("bloom", False), ("t5", False)]
)
def test_which_models_take_attention_functions(family: str, does: bool) -> None:
    assert takes_attention_functions(AutoConfig.for_model(family)) == does


def test_both_names_of_the_cache_argument() -> None:
    class Old(torch.nn.Module):
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class New(torch.nn.Module):
        def forward(self, input_ids: Any, cache: Any = None, logits_to_keep: int = 0) -> None: ...

    class Unknown(torch.nn.Module):
        def forward(self, input_ids: Any) -> None: ...

    assert _forward_signature(Old) == ("past_key_values", False)  # type: ignore[arg-type]
    assert _forward_signature(New) == ("cache", True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Unknown"):
        _forward_signature(Unknown)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_installed_models_are_understood(family: str) -> None:
    model: PreTrainedModel = make_model(family)
    name, keeps_logits = _forward_signature(type(model))
    assert name in ("cache", "past_key_values")
    assert keeps_logits
