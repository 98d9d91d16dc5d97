"""The gated adapter: bitwise nothing at clean columns, and a folder that is checked on loading."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mars.checkpoint import attach, load
from mars.decoding.generate import generate
from mars.decoding.plan import RowPlan
from mars.engine.runner import Runner
from mars.errors import UserError
from mars.gated import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    GatedAdapter,
    GatedConfig,
    all_linear,
    fingerprint,
    load_adapter,
    mask_columns,
    read_config,
)
from tests.conftest import FAMILIES, make_model

BLOCK = 3


def config_for(model, **changes):
    settings = {
        "base": "tiny",
        "fingerprint": fingerprint(model),
        "block_size": BLOCK,
        "rank": 4,
        "targets": all_linear(model),
        "mask_embeddings": BLOCK,
        "head_width": 0,
    }
    return GatedConfig(**(settings | changes))


def make_adapter(model, **changes):
    """Attach an adapter with random weights: all of it has an effect."""
    torch.manual_seed(5)
    adapter = GatedAdapter(model, config_for(model, **changes))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return adapter.to(model.dtype).requires_grad_(False)


def step_logits(model, plans):
    runner = Runner(model, num_rows=2, max_positions=64)
    prompts = [[5, 9, 17, 33, 41], [7, 8, 9, 10, 11, 12, 13]]
    for _ in prompts:
        runner.add_row()
    runner.forward(0, [prompt[:-1] for prompt in prompts], [RowPlan(), RowPlan()])
    return runner.forward(0, prompts, plans)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_clean_logits_are_bitwise_those_of_the_base(family, dtype):
    plans = [
        RowPlan(drafts=(3, 4), groups=(0, 1, 2), window=3),
        RowPlan(drafts=(6,), groups=(1,), window=2),
    ]
    base = make_model(family).to(dtype)
    before, before_masks = step_logits(base, plans)
    make_adapter(base)
    after, masks = step_logits(base, plans)
    assert torch.equal(before, after)
    assert not torch.allclose(before_masks.float(), masks.float(), atol=0.1)


def test_without_mask_columns_every_call_is_the_base_models():
    model = make_model()
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model(ids).logits
    make_adapter(model)
    assert torch.equal(model(ids).logits, before)
    with mask_columns(model, 4, torch.zeros(1, 0, dtype=torch.long)):
        assert torch.equal(model(ids).logits, before)


def test_state_dict_of_the_base_is_untouched():
    model = make_model()
    names = list(model.state_dict())
    make_adapter(model)
    assert list(model.state_dict()) == names


def test_each_offset_has_its_embedding_or_all_share_one():
    plan = [RowPlan(groups=(0,), window=3), RowPlan(groups=(0,), window=3)]
    for count, is_equal in ((1, True), (BLOCK, False)):
        model = make_model()
        adapter = make_adapter(model, mask_embeddings=count)
        seen = []
        model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(output)
        )
        step_logits(model, plan)
        masks = seen[-1][:, -3:]
        assert torch.equal(masks[:, 0], masks[:, 1]) is is_equal
        assert torch.equal(masks[0, 0], adapter.mask_embedding[0])


def test_state_is_forgotten_after_an_error():
    model = make_model()
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model(ids).logits
    make_adapter(model)
    with (
        pytest.raises(RuntimeError, match="stop"),
        mask_columns(model, 2, torch.zeros(1, 2, dtype=torch.long)),
    ):
        raise RuntimeError("stop")
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_adapter_predicts_as_masks_with_the_mean_embedding(family):
    """LoRA starts at zero: only the embedding of the masks differs from the base."""
    model = make_model(family)
    adapter = GatedAdapter(model, config_for(model))
    mean = model.get_input_embeddings().weight.mean(0)
    torch.testing.assert_close(adapter.mask_embedding.detach(), mean.expand(BLOCK, -1))
    assert all(not b.weight.any() for b in adapter.lora_b)


def test_folder_keeps_everything(tmp_path):
    model = make_model()
    plan = [RowPlan(drafts=(3,), groups=(0, 1), window=3), RowPlan(groups=(0,), window=1)]
    adapter = make_adapter(model, head_width=5)
    with torch.no_grad():  # saved in bfloat16
        for parameter in adapter.parameters():
            parameter.copy_(parameter.bfloat16())
    _, expected = step_logits(model, plan)
    adapter.save(tmp_path)
    again = make_model()
    loaded = load_adapter(again, tmp_path, base="tiny")
    assert torch.equal(step_logits(again, plan)[1], expected)
    assert loaded.config == adapter.config
    assert loaded.head is not None
    assert torch.equal(loaded.head.output.weight, adapter.head.output.weight)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.fixture
def saved(tmp_path, tiny_checkpoint):
    """A base model's folder and that of an adapter for it."""
    checkpoint = tiny_checkpoint("llama", tie_word_embeddings=True)
    checkpoint.mars = None
    checkpoint.save(tmp_path / "base")
    make_adapter(checkpoint.model, base=str(tmp_path / "base")).save(tmp_path / "adapter")
    return tmp_path


def test_load_with_an_adapter(saved):
    for checkpoint in (load(saved / "base", adapter=saved / "adapter"), load(saved / "adapter")):
        assert checkpoint.mars.adapter == "gated"
        assert checkpoint.mars.block_size == BLOCK
        assert checkpoint.mask_token_id is None
        ar = generate(checkpoint, [5, 6, 7], mode="ar", max_new_tokens=20)
        exact = generate(checkpoint, [5, 6, 7], mode="exact", max_new_tokens=20)
        assert exact.token_ids == ar.token_ids
    plain = load(saved / "base")
    assert plain.adapter is None
    assert generate(plain, [5, 6, 7], mode="ar", max_new_tokens=20).token_ids == ar.token_ids


def test_saving_a_checkpoint_with_an_adapter_saves_the_adapter(saved, tmp_path):
    load(saved / "adapter").save(tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == sorted(
        [CONFIG_FILE, WEIGHTS_FILE]
    )


def test_precision_of_the_base_does_not_matter(saved):
    for dtype in ("float32", "bfloat16"):
        assert load(saved / "adapter", dtype=dtype).adapter is not None


def test_window_larger_than_trained_is_refused(saved):
    with pytest.raises(UserError, match=f"window 4 is larger than the block size {BLOCK}"):
        generate(load(saved / "adapter"), [5, 6, 7], window=4)


def test_other_base_is_refused(saved, tiny_checkpoint):
    other = tiny_checkpoint("llama", seed=1, tie_word_embeddings=True)
    other.mars = None
    other.save(saved / "other")
    with pytest.raises(UserError, match=r"was trained for .*base.*fingerprint"):
        load(saved / "other", adapter=saved / "adapter")


def test_wrong_hash_is_refused(saved):
    path = saved / "adapter" / CONFIG_FILE
    entries = json.loads(path.read_text())
    path.write_text(json.dumps(entries | {"fingerprint": "0" * 64}))
    with pytest.raises(UserError, match="fingerprint 000000000000"):
        load(saved / "adapter")


def test_missing_mask_embeddings_are_reported(saved):
    path = saved / "adapter" / WEIGHTS_FILE
    tensors = load_file(path)
    del tensors["mask_embedding"]
    save_file(tensors, path)
    with pytest.raises(UserError, match="lacks the mask embeddings"):
        load(saved / "adapter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.mlp.up_proj.lora_a"), "lacks 'model.layers.0.mlp.up_proj"),
        (lambda t: t.update(more=torch.ones(1)), "unknown tensor 'more'"),
        (lambda t: t.update(mask_embedding=torch.ones(1, 2)), r"shape \(1, 2\)"),
    ],
)
def test_damaged_weights_are_reported(saved, change, message):
    path = saved / "adapter" / WEIGHTS_FILE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(UserError, match=message):
        load(saved / "adapter")


@pytest.mark.parametrize("cut", [0, 100])
def test_truncated_weights_are_reported(saved, cut):
    path = saved / "adapter" / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match="Cannot read"):
        load(saved / "adapter")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "format version"),
        (None, f"there is no {CONFIG_FILE}"),
    ],
)
def test_unreadable_config_is_reported(saved, text, message):
    path = saved / "adapter" / CONFIG_FILE
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(saved / "adapter")


@pytest.mark.parametrize(
    "change", [{"rank": 0}, {"block_size": True}, {"mask_embeddings": 2}, {"head_width": -1}]
)
def test_bad_config_values_are_refused(change):
    with pytest.raises(UserError, match=next(iter(change))):
        config_for(make_model(), **change)


def test_unknown_target_is_refused():
    model = make_model()
    with pytest.raises(UserError, match="no linear layer named 'c_attn'"):
        GatedAdapter(model, config_for(model, targets=("q_proj", "c_attn")))


def test_two_adapters_do_not_pile_up(saved):
    checkpoint = load(saved / "base")
    attach(checkpoint, load_adapter(checkpoint.model, saved / "adapter", base="base"))
    with pytest.raises(UserError, match="already has a gated adapter"):
        load_adapter(checkpoint.model, saved / "adapter", base="base")


def test_adapter_of_an_adapter_is_refused(saved):
    with pytest.raises(UserError, match="itself a gated adapter"):
        load(saved / "adapter", adapter=saved / "adapter")
