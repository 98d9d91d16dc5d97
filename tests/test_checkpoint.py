"""Checkpoints: ordinary Hugging Face folders plus one block, and the choice of the mask token."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from mars.checkpoint import (
    Checkpoint,
    MarsConfig,
    check_supported,
    choose_mask_token,
    load,
    parse_dtype,
    prepare_for_training,
)
from mars.errors import UserError
from tests.conftest import FAMILIES, make_model, make_tokenizer

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
        (BLOCK | {"mask_token_id": -1}, "outside the vocabulary"),
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


# --- the mask token


def tokenizer_with(*special: str, **roles: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer with special tokens 0, 1, ... and the words w0 .. w9 behind them."""
    names = [*special, *(f"w{i}" for i in range(10))]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", **roles)


def mean_of_others(weight: torch.Tensor, row: int) -> torch.Tensor:
    return torch.cat([weight[:row], weight[row + 1 :]]).mean(0)


def choose(tokenizer: PreTrainedTokenizerFast, *, spare_rows: int = 3, twins: str = "") -> int:
    """Choose for a model whose special tokens `twins` have equal embeddings; check the row."""
    model = make_model(vocab_size=len(tokenizer) + spare_rows)
    weight = model.get_input_embeddings().weight.data
    for token in twins.split():
        weight[tokenizer.convert_tokens_to_ids(token)] = 0.5
    untouched = weight.clone()
    chosen = choose_mask_token(model, tokenizer)
    weight = model.get_input_embeddings().weight
    if chosen != tokenizer.mask_token_id:
        assert torch.allclose(weight[chosen], mean_of_others(weight, chosen), atol=1e-6)
    rows = [row for row in range(len(untouched)) if row != chosen]
    assert torch.equal(weight[rows], untouched[rows])
    return chosen


def test_order_of_choice():
    """Each tokenizer lacks what the one before was chosen for."""
    special = ["<eos>", "<user>", "<reserved_1>", "<reserved_2>", "<a>", "<b>", "<mask>"]
    own = tokenizer_with(*special, mask_token="<mask>")
    assert choose(own, twins="<a> <b>") == 6
    reserved = tokenizer_with(*special[:-1])
    assert choose(reserved, twins="<a> <b>") == 3
    untrained = tokenizer_with("<eos>", "<user>", "<a>", "<b>", "<c>")
    assert choose(untrained, twins="<a> <b>") == 3
    trained = tokenizer_with("<eos>", "<user>", "<a>")
    assert choose(trained) == len(trained) == 13
    full = tokenizer_with("<eos>")
    assert choose(full, spare_rows=0) == len(full) == 11  # a new row


def test_tokens_in_use_are_not_chosen():
    tokenizer = tokenizer_with(
        "<eos>", "<unused_bos>", "<unused_pad>", "<reserved>", bos_token="<unused_bos>",
        pad_token="<unused_pad>",
    )  # fmt: skip
    tokenizer.chat_template = "<reserved>{{ messages }}"
    assert choose(tokenizer) == len(tokenizer)


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
    assert torch.equal(model(ids).logits[..., :11], before)
    checkpoint.save(tmp_path)
    loaded = load(tmp_path, device="cpu")
    assert loaded.mask_token_id == 11
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)


# --- preparing


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


def test_a_mask_of_ones_own(plain):
    prepare_for_training(plain, block_size=4, adapter="full", mask_token_id=200)
    assert plain.mask_token_id == 200


@pytest.mark.parametrize(
    ("mask", "words"),
    [(260, "outside the vocabulary of 260"), (-1, "outside"), (2, "ends an answer")],
)
def test_an_unusable_mask(plain, mask, words):
    with pytest.raises(UserError, match=words):
        prepare_for_training(plain, block_size=4, adapter="full", mask_token_id=mask)
    assert plain.mars is None


def test_an_unusable_block_size(plain):
    with pytest.raises(UserError, match="block_size"):
        prepare_for_training(plain, block_size=0, adapter="full")
