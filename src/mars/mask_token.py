"""The mask token: find an unused vocabulary entry for it, or add one."""

import re
from collections.abc import Set

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars.errors import UserError

RESERVED_NAME = re.compile(r"mask|reserved|unused|extra_id|placeholder|dummy", re.IGNORECASE)


def check_mask_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, token_id: int, *, ends: Set[int]
) -> None:
    """Refuse an id that does not exist or that has a meaning already; `ends` end an answer.

    Raises:
        UserError: says what the id stands for.
    """
    rows = input_embedding(model).num_embeddings
    if not 0 <= token_id < rows:
        raise UserError(
            f"mask_token_id {token_id} lies outside the vocabulary of {rows} tokens. "
            f"Give an id from 0 to {rows - 1}, or leave it out to have one chosen."
        )
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token is not None and token_id not in _spare_tokens(tokenizer, ends):
        raise UserError(
            f"mask_token_id {token_id} is {token!r}, which text is encoded to, or which begins, "
            "ends or pads an answer. Give an unused id, or leave it out to have one chosen."
        )


def choose_mask_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, ends: Set[int]
) -> int:
    """Find an unused vocabulary entry for the mask, or add one row; `ends` end an answer.

    Order: the tokenizer's own mask token; a special token whose name says it is reserved; a
    special token that was never trained (its embedding equals another special token's); a row
    of the embedding matrix beyond the tokenizer's last id; a new row. The row is set to the mean
    embedding: on the default model an untouched one starts at 16 nats a token, the mean at 6.
    """
    own = tokenizer.mask_token_id
    if own is not None and own < input_embedding(model).num_embeddings:
        return own
    token = _unused_token(input_embedding(model).weight.detach(), tokenizer, ends)
    if token is None:
        return add_embedding_row(model)
    _initialise_row(model, token)
    return token


def _unused_token(
    weight_VD: torch.Tensor, tokenizer: PreTrainedTokenizerBase, ends: Set[int]
) -> int | None:
    """Return an id that no text is ever encoded to, if the vocabulary has one."""
    rows = len(weight_VD)
    added = tokenizer.added_tokens_decoder
    spare = [i for i in _spare_tokens(tokenizer, ends) if added[i].special and i < rows]
    reserved = [i for i in spare if RESERVED_NAME.search(added[i].content)]
    if reserved:
        return reserved[-1]
    untrained = _rows_with_a_twin(weight_VD, sorted(spare))
    if untrained:
        return untrained[-1]
    first_unnamed = max(tokenizer.get_vocab().values()) + 1
    return first_unnamed if first_unnamed < rows else None


def _spare_tokens(tokenizer: PreTrainedTokenizerBase, ends: Set[int]) -> list[int]:
    """Return the ids of the added tokens that have no known purpose."""
    used = {tokenizer.bos_token_id, tokenizer.pad_token_id, *ends}
    template = str(tokenizer.chat_template or "")
    return [
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if i not in used and token.content not in template
    ]


def _rows_with_a_twin(weight_VD: torch.Tensor, ids: list[int]) -> list[int]:
    """Return the ids whose embedding (nearly) equals that of another of them."""
    if len(ids) < 2:
        return []
    rows = torch.nn.functional.normalize(weight_VD[ids].float(), dim=-1)
    similarity = rows @ rows.T
    similarity.fill_diagonal_(0)
    return [
        i
        for i, has_twin in zip(ids, (similarity > 0.9999).any(-1).tolist(), strict=True)
        if has_twin
    ]


def input_embedding(model: PreTrainedModel) -> torch.nn.Embedding:
    """Return the layer that embeds tokens (`transformers` gives it a vaguer type)."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    return embedding


def output_head(model: PreTrainedModel) -> torch.nn.Module:
    """Return the layer that makes logits of hidden states; adapters may have wrapped it."""
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Module)
    return head


def add_embedding_row(model: PreTrainedModel) -> int:
    """Add one row to the vocabulary of `model`; return its id."""
    rows = input_embedding(model).num_embeddings
    model.resize_token_embeddings(rows + 1, mean_resizing=False)
    _initialise_row(model, rows)
    return rows


@torch.no_grad()
def _initialise_row(model: PreTrainedModel, row: int) -> None:
    """Set one input (and output) embedding row to the mean of the other rows."""
    for layer in (input_embedding(model), output_head(model)):
        assert isinstance(layer, torch.nn.Embedding | torch.nn.Linear)
        weight = layer.weight
        weight[row] = 0
        weight[row] = (weight.float().sum(0) / (len(weight) - 1)).to(weight.dtype)
