"""The mask token: what is chosen, in which order, and what it starts from."""

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mars.mask_token import choose_mask_token
from tests.conftest import make_model


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
    chosen = choose_mask_token(model, tokenizer, ends={0})
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


def test_tokens_without_an_embedding_are_not_chosen():
    names = [f"<reserved_{i}>" for i in range(3)]
    for roles in ({}, {"mask_token": "<reserved_2>"}):
        assert choose(tokenizer_with("<eos>", *names, **roles), spare_rows=-11) == 2


def test_an_end_that_only_the_generation_config_knows_is_not_chosen():
    tokenizer = tokenizer_with("<eos>", "<reserved>")
    assert choose_mask_token(make_model(vocab_size=12), tokenizer, ends={0, 1}) == 12
