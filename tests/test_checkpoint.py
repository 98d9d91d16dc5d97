"""Checkpoints: ordinary Hugging Face folders plus one block, and preparing them for training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from mars.checkpoint import (
    Checkpoint,
    MarsConfig,
    check_supported,
    load,
    load_tokenizer,
    parse_dtype,
    prepare_for_training,
)
from mars.errors import UserError
from mars.mask_token import output_head
from tests.conftest import FAMILIES, make_model, make_tokenizer
from tests.test_mask_token import mean_of_others, tokenizer_with

BLOCK = {"block_size": 4, "mask_token_id": 3, "adapter": "full", "format_version": 1}


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def plain() -> Checkpoint:
    return Checkpoint(model=make_model(), tokenizer=make_tokenizer(), name="plain")


# --- loading and saving


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load(tiny_checkpoint, tmp_path, family):
    saved = tiny_checkpoint(family, block_size=7)
    saved.save(tmp_path)
    loaded = load(tmp_path, device="cpu")
    assert loaded.mars == MarsConfig(**BLOCK | {"block_size": 7})
    assert loaded.name == str(tmp_path)
    assert not loaded.model.training
    assert loaded.eos_token_ids == saved.eos_token_ids
    assert loaded.context_length == 512
    ids = torch.arange(4, 60)[None]
    assert torch.equal(loaded.model(ids).logits, saved.model(ids).logits)
    text = "<|im_start|>user\nhi <|mask|>"
    assert loaded.tokenizer(text)["input_ids"] == saved.tokenizer(text)["input_ids"]
    assert loaded.tokenizer.chat_template == saved.tokenizer.chat_template


def test_transformers_alone_loads_it(tiny_checkpoint, tmp_path):
    """The `mars` block is the only addition: without this package the folder is a plain model."""
    saved = tiny_checkpoint("qwen2")
    saved.save(tmp_path / "model")
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"folder = {str(tmp_path / 'model')!r}\n"
        "model = AutoModelForCausalLM.from_pretrained(folder).eval()\n"
        "AutoTokenizer.from_pretrained(folder)\n"
        "torch.save(model(torch.arange(4, 60)[None]).logits, folder + '/logits.pt')\n"
        "print(type(model).__module__, 'mars' in sys.modules)"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "transformers.models.qwen2.modeling_qwen2 False\n"
    assert "mars" not in done.stderr  # no warning about an unknown entry
    logits = torch.load(tmp_path / "model" / "logits.pt")
    assert torch.equal(logits, saved.model(torch.arange(4, 60)[None]).logits)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["mars"] == BLOCK
    assert "auto_map" not in config


def test_a_plain_model_has_no_mask(plain, tmp_path):
    plain.save(tmp_path)
    loaded = load(tmp_path)
    assert loaded.mars is None
    with pytest.raises(UserError, match=r"plain AR model.*mars train"):
        _ = loaded.mask_token_id


def test_every_end_of_sequence_counts(plain):
    plain.model.generation_config.eos_token_id = [5, 6]
    assert plain.eos_token_ids == {2, 5, 6}  # 2 is the tokenizer's
    plain.model.generation_config.eos_token_id = None
    assert plain.eos_token_ids == {2}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype(plain, tmp_path, dtype):
    plain.save(tmp_path)
    assert load(tmp_path, dtype=dtype).model.dtype == torch.bfloat16
    with pytest.raises(UserError, match="int8"):
        parse_dtype("int8")


@pytest.mark.parametrize(
    ("stored", "has_kernels", "expected"),
    [
        (torch.float32, True, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),  # no processor computes in it
    ],
)
def test_by_default_the_dtype_is_the_stored_one_if_it_is_fast(
    plain, tmp_path, monkeypatch, stored, has_kernels, expected
):
    plain.model.to(stored)
    plain.save(tmp_path)
    monkeypatch.setattr("mars.checkpoint.linear_path", lambda _: int(has_kernels))
    assert load(tmp_path, device="cpu").model.dtype == expected


def test_unknown_names(tmp_path):
    with pytest.raises(UserError, match="nobody/nothing"):
        load("nobody/nothing")
    with pytest.raises(UserError, match="folder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (BLOCK | {"format_version": 2}, "Update mars-lm"),
        (BLOCK | {"colour": "red"}, "colour"),
        (BLOCK | {"block_size": 0}, "block_size"),
        (BLOCK | {"mask_token_id": 260}, "outside the vocabulary"),
        (BLOCK | {"mask_token_id": -1}, "mask_token_id must be an integer of at least 0"),
        (BLOCK | {"mask_token_id": True}, "mask_token_id must be an integer"),
        (BLOCK | {"block_size": 4.0}, "block_size must be an integer"),
        (BLOCK | {"adapter": "prefix"}, "adapter must be one of full, lora"),
    ],
)
def test_a_damaged_block(plain, tmp_path, block, words):
    plain.save(tmp_path)
    edit_config(tmp_path, mars=block)
    with pytest.raises(UserError, match=words):
        load(tmp_path)


def test_an_incomplete_block(plain, tmp_path):
    plain.save(tmp_path)
    edit_config(tmp_path, mars={"block_size": 4, "format_version": 1})
    with pytest.raises(UserError, match="mask_token_id"):
        load(tmp_path)


def test_saving_a_plain_model_drops_an_old_block(tiny_checkpoint, tmp_path):
    checkpoint = tiny_checkpoint()
    checkpoint.save(tmp_path)
    checkpoint.mars = None
    checkpoint.save(tmp_path)
    assert load(tmp_path).mars is None


def test_missing_weights(plain, tmp_path):
    plain.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of the model's weights.*layers\.1\.mlp"):
        load(tmp_path)


def test_tied_weights_are_not_missing(tmp_path):
    tied = Checkpoint(
        model=make_model(tie_word_embeddings=True), tokenizer=make_tokenizer(), name="tied"
    )
    tied.save(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load(tmp_path)


def test_a_damaged_generation_config(plain, tmp_path):
    plain.save(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    for read in (load, load_tokenizer):
        with pytest.raises(UserError, match="Cannot load"):
            read(tmp_path)
    (tmp_path / "generation_config.json").unlink()  # optional
    assert load_tokenizer(tmp_path)[1] == {2}
    assert load(tmp_path).eos_token_ids == {2}


def test_a_file_is_no_checkpoint(plain, tmp_path):
    plain.save(tmp_path)
    for read in (load, load_tokenizer):
        with pytest.raises(UserError, match="is a file"):
            read(tmp_path / "config.json")


# --- LoRA folders


def save_lora(folder: Path, *, tied: bool, mars: dict | None) -> PreTrainedModel:
    """Write a base model, and beside it an adapter as the training does; return the sum of both."""
    peft = pytest.importorskip("peft")
    base = Checkpoint(
        model=make_model(tie_word_embeddings=tied), tokenizer=make_tokenizer(), name="base"
    )
    base.save(folder / "base")
    model = load(folder / "base", device="cpu").model
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2,
        target_modules="all-linear",
        init_lora_weights=False,
        trainable_token_indices={"embed_tokens": [3]} if mars else None,
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config)
    if mars:
        model.config.mars = mars
        with torch.no_grad():
            model.get_input_embeddings().token_adapter.trainable_tokens_delta["default"] += 1
    wrapped.save_pretrained(folder / "adapter")
    base.tokenizer.save_pretrained(folder / "adapter")
    model.config.save_pretrained(folder / "adapter")
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mars", [BLOCK | {"adapter": "lora"}, None], ids=["mars", "sft"])
def test_load_lora(tmp_path, tied, mars):
    adapted = save_lora(tmp_path, tied=tied, mars=mars)
    loaded = load(tmp_path / "adapter", device="cpu")
    assert loaded.mars == (MarsConfig(**mars) if mars else None)
    assert getattr(loaded.model.config, "mars", None) == mars
    ids = torch.arange(3, 60)[None]
    expected = adapted(ids).logits
    assert torch.allclose(loaded.model(ids).logits, expected, atol=1e-4)
    hidden = adapted.get_decoder()(ids).last_hidden_state
    assert torch.equal(output_head(adapted)(hidden), expected)  # whatever wraps the head


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_truncated_adapter(tmp_path, name):
    save_lora(tmp_path, tied=False, mars=BLOCK)
    file = tmp_path / "adapter" / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="Cannot load"):
        load(tmp_path / "adapter")


def test_an_adapter_without_some_of_its_weights(tmp_path):
    save_lora(tmp_path, tied=False, mars=BLOCK)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    weights.pop(next(name for name in weights if "lora_B" in name))
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="missing adapter keys"):
        load(tmp_path / "adapter")


# --- architectures


@pytest.mark.parametrize("family", FAMILIES)
def test_supported(tiny_model, family):
    check_supported(tiny_model(family).config)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("mistral", {"sliding_window": 16}, "sliding-window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, "sliding-window"),
        ("gemma2", {}, "sliding-window"),
        ("gemma3_text", {}, "sliding"),
        ("qwen3_next", {}, "linear_attention"),
        ("t5", {}, "encoder-decoder"),
        ("bloom", {}, "attention interface"),
        ("mpt", {}, "attention interface"),
        ("phi3", {"rope": "longrope"}, "longrope"),
        ("llama", {"rope": "dynamic"}, "dynamic"),
    ],
)
def test_unsupported(family, settings, words):
    rope = settings.pop("rope", None)
    config = AutoConfig.for_model(family, **settings)
    if rope:
        config.rope_parameters = {"rope_type": rope, "rope_theta": 1e4}
    with pytest.raises(UserError, match=words):
        check_supported(config)


def test_qwen2_names_a_window_that_it_does_not_use():
    check_supported(AutoConfig.for_model("qwen2", sliding_window=4096, use_sliding_window=False))


def test_load_refuses_before_the_weights_are_read(plain, tmp_path):
    plain.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, model_type="mistral", sliding_window=16)
    with pytest.raises(UserError, match="sliding-window"):
        load(tmp_path)


# --- preparing


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_vocabulary_gets_one_row(tmp_path, tied):
    tokenizer = tokenizer_with("<eos>")
    model = make_model(vocab_size=11, tie_word_embeddings=tied, eos_token_id=0)
    ids = torch.arange(11)[None]
    before = model(ids).logits
    checkpoint = Checkpoint(model=model, tokenizer=tokenizer, name="full")
    prepare_for_training(checkpoint, block_size=4, adapter="full")
    assert checkpoint.mask_token_id == 11
    assert model.config.vocab_size == 12
    output = model.get_output_embeddings().weight
    assert torch.allclose(output[11], mean_of_others(output, 11), atol=1e-6)
    # Nearly: a product with more outputs may add up in another order.
    torch.testing.assert_close(model(ids).logits[..., :11], before, rtol=1e-6, atol=1e-6)
    checkpoint.save(tmp_path)
    loaded = load(tmp_path, device="cpu")
    assert loaded.mask_token_id == 11
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)


def test_preparing_a_plain_model(plain, tmp_path):
    prepare_for_training(plain, block_size=8, adapter="lora")
    assert plain.mars == MarsConfig(block_size=8, mask_token_id=3, adapter="lora")
    assert plain.model.config.mars == BLOCK | {"block_size": 8, "adapter": "lora"}
    assert MarsConfig.from_config(plain.model.config) == plain.mars


def test_a_second_training_keeps_the_mask(tiny_checkpoint):
    checkpoint = tiny_checkpoint()
    checkpoint.mars = MarsConfig(block_size=4, mask_token_id=77)
    row = checkpoint.model.get_input_embeddings().weight[77].clone()
    prepare_for_training(checkpoint, block_size=16, adapter="full")
    assert checkpoint.mars == MarsConfig(block_size=16, mask_token_id=77)
    assert torch.equal(checkpoint.model.get_input_embeddings().weight[77], row)


@pytest.mark.parametrize("mask", [3, 262])
def test_a_mask_of_ones_own(mask):
    """A special token without a purpose, and a row behind the tokenizer's last token."""
    plain = Checkpoint(model=make_model(vocab_size=264), tokenizer=make_tokenizer(), name="plain")
    row = plain.model.get_input_embeddings().weight[mask].clone()
    prepare_for_training(plain, block_size=4, adapter="full", mask_token_id=mask)
    assert plain.mask_token_id == mask
    assert torch.equal(plain.model.get_input_embeddings().weight[mask], row)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (260, "outside the vocabulary of 260"),
        (-1, "outside"),
        (2, "ends or pads"),
        (0, "pads an answer"),
        (1, "im_start.*text is encoded to"),
        (200, "text is encoded to"),
        (5, "ends or pads"),
    ],
)
def test_an_unusable_mask(plain, mask, words):
    plain.model.generation_config.eos_token_id = [2, 5]
    with pytest.raises(UserError, match=words):
        prepare_for_training(plain, block_size=4, adapter="full", mask_token_id=mask)
    assert plain.mars is None


def test_an_unusable_block_size(plain):
    with pytest.raises(UserError, match="block_size"):
        prepare_for_training(plain, block_size=0, adapter="full")
