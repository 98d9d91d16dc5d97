"""The decoder of a model is made once, and again after every change."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mars.decoding.plan import RowPlan
from mars.engine.decoder import FusedDecoder
from mars.engine.kernels.linear import _mapped_files
from mars.engine.runner import Runner
from tests.engine.test_decoder import (
    add_adapter,
    dtype,  # noqa: F401  # a fixture
    needs_kernel,
    small_model,
    tokens_of,
)

pytestmark = needs_kernel
POSITIONS = 128


def decoder_of(model: PreTrainedModel, positions: int = POSITIONS) -> FusedDecoder:
    decoder = FusedDecoder.of(model, positions)
    assert decoder is not None
    return decoder


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    runner = Runner(model, num_rows=1, max_positions=POSITIONS)
    runner.add_row()
    return runner.forward(0, [tokens_of(0)], [RowPlan()])[0]


def test_it_is_made_once_for_as_many_positions_or_fewer() -> None:
    model = small_model()
    decoder = decoder_of(model)
    assert decoder_of(model) is decoder
    assert decoder_of(model, POSITIONS - 1) is decoder
    assert decoder_of(model, POSITIONS + 1) is not decoder


CHANGES = {
    "in place": lambda weight: weight.mul_(2),
    "behind torch's back": lambda weight: weight.data.mul_(2),
    "replaced": lambda weight: setattr(weight, "data", 2 * weight.data),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj", "layers.0.self_attn.q_proj"])
def test_changed_weights_are_seen(change: str, name: str) -> None:
    model, fresh = small_model(), small_model()
    before = logits_of(model)
    with torch.no_grad():
        for changed in (model, fresh):
            CHANGES[change](changed.model.get_submodule(name).weight)
    after = logits_of(model)
    assert not torch.equal(before, after)
    assert torch.equal(after, logits_of(fresh))


def test_one_change_that_torch_does_not_tell_has_all_layers_packed_again() -> None:
    model, fresh = small_model(), small_model()
    logits_of(model)
    for changed in (model, fresh):
        layers = changed.model.layers
        layers[0].mlp.up_proj.weight.data.neg_()
        # Not among the eight weights that are looked at.
        layers[1].mlp.up_proj.weight.data[0, 0] += 1
    assert torch.equal(logits_of(model), logits_of(fresh))


def test_an_adapter_and_its_changes_are_seen() -> None:
    model = small_model()
    bare = decoder_of(model)
    adapter = add_adapter(model)
    adapted = decoder_of(model)
    assert adapted is not bare
    assert decoder_of(model) is adapted
    with torch.no_grad():
        next(adapter.layers())[1][0].weight.neg_()
    assert decoder_of(model) is not adapted


def test_hooks_and_training_are_seen() -> None:
    model = small_model()
    decoder = decoder_of(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert FusedDecoder.of(model, POSITIONS) is None
    handle.remove()
    assert decoder_of(model) is decoder
    model.train()
    assert FusedDecoder.of(model, POSITIONS) is None


def test_a_model_is_forgotten_with_its_decoder() -> None:
    model = small_model()
    adapter = add_adapter(model)
    seen = weakref.ref(model)
    decoder_of(model)
    del model, adapter
    gc.collect()
    assert seen() is None


def resident_kilobytes(address: int) -> int:
    """How much of the mapping at an address is in memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key = line.split()[0]
        if "-" in key and not key.endswith(":"):
            first, end = (int(number, 16) for number in key.split("-"))
            inside = first <= address < end
        elif inside and key == "Rss:":
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not _mapped_files(), reason="this system does not tell what is mapped")
@pytest.mark.parametrize("is_tied", [False, True])
def test_pages_of_a_weight_file_are_given_back(is_tied: bool, tmp_path: Path) -> None:
    """All but those that are looked at: the embedding's, which may be the output layer's, too."""
    saved = small_model(
        hidden_size=960, intermediate_size=4096, vocab_size=4096, tie_word_embeddings=is_tied
    )
    saved.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=saved.dtype).eval()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert any(first <= weight.data_ptr() < end for first, end in _mapped_files())
    size = sum(parameter.nbytes for parameter in model.parameters()) // 1024
    embedding = model.get_input_embeddings().weight.nbytes // 1024
    with torch.no_grad():
        assert sum(float(p.sum()) for p in model.parameters()) != 0  # now they are in memory
    assert resident_kilobytes(weight.data_ptr()) > 0.9 * size
    logits = logits_of(model)
    assert 0.95 * embedding < resident_kilobytes(weight.data_ptr()) < 1.2 * embedding + 1000
    assert torch.equal(logits, logits_of(copy.deepcopy(model)))
    for loaded, own in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(loaded, own)


def test_the_next_run_takes_over_the_memory_of_the_cache() -> None:
    model = small_model()
    runner = Runner(model, num_rows=2, max_positions=64)
    for _ in range(2):
        runner.add_row()
    tokens = [tokens_of(row, 9) for row in range(2)]
    expected = runner.forward(0, tokens, [RowPlan()] * 2)[0].clone()
    for tensor in runner.cache.keys + runner.cache.values:
        tensor.fill_(float("nan"))
    addresses = [tensor.data_ptr() for tensor in runner.cache.keys]
    beside = Runner(model, num_rows=2, max_positions=64)
    beside.add_row()
    beside.forward(0, tokens[:1], [RowPlan()])
    assert beside.cache.keys[0].data_ptr() != addresses[0], "it is still in use"
    del runner
    again = Runner(model, num_rows=2, max_positions=64)
    for _ in range(2):
        again.add_row()
    assert torch.equal(again.forward(0, tokens, [RowPlan()] * 2)[0], expected)
    assert [tensor.data_ptr() for tensor in again.cache.keys] == addresses
