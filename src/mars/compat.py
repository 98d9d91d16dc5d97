"""Everything that depends on the version of `transformers`, and nothing else (5.20 to 5.x).

The engine runs stock models through their own forward. It needs three things of them that have
no stable interface: the name of the cache argument, a cache class of its own, and an attention
function of its own for the time of one forward.
"""

import inspect
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Cache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

# Since 5.24 models call it `cache` and warn about the older name.
_CACHE_ARGUMENTS = ("cache", "past_key_values")

# One lock per model; the guard is for the dictionary, which is not safe by itself.
_locks: WeakKeyDictionary[PreTrainedModel, threading.Lock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


class ExternalCache(Cache):
    """Base for a cache that stores keys and values its own way.

    A subclass implements `update(keys, values, layer, ...)`, which attention layers call, and
    returns what they shall attend to. Position ids and a 4-D mask must be given to every forward:
    then models ask a cache for nothing else.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make `name` an attention implementation that models can be switched to."""
    AttentionInterface.register(name, function)
    # Without a mask function of that name, masks would silently be dropped instead of built.
    AttentionMaskInterface.register(name, sdpa_mask)


def backend_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str] | None:
    """Return what decodes tokens in a stock tokenizer, without what is around it.

    That takes as much time again. None if the tokenizer has a way of its own.
    """
    stock = PreTrainedTokenizerFast
    if not isinstance(tokenizer, stock):
        return None
    for name in ("decode", "_decode"):
        is_own = getattr(type(tokenizer), name) is not getattr(stock, name)
        if is_own or name in vars(tokenizer):
            return None
    return tokenizer.backend_tokenizer.decode


def takes_attention_functions(config: PretrainedConfig) -> bool:
    """Say whether the causal language model of a config calls registered attention functions.

    Some model classes (Bloom, MPT, Falcon) compute attention in their own way, with position
    biases that a mask of ours would replace.
    """
    mapping: Any = AutoModelForCausalLM._model_mapping
    model_class = mapping.get(type(config), None)
    return getattr(model_class, "_supports_attention_backend", False) is True


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Generator[None]:
    """Run the model with another attention implementation inside the `with` block.

    Threads that share a model take turns: the setting belongs to the model, not to a call.
    """
    config: Any = model.config
    with _locks_guard:
        lock = _locks.setdefault(model, threading.Lock())
    with lock:
        previous = config._attn_implementation
        config._attn_implementation = name
        try:
            yield
        finally:
            config._attn_implementation = previous


def cached_forward(
    model: PreTrainedModel,
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    visible: torch.Tensor,
    cache: ExternalCache,
    num_logits: int,
) -> torch.Tensor:
    """Run a stock causal language model and return the logits of its last columns.

    Args:
        model: any decoder-only model of `transformers`.
        input_ids: int64 (B, T).
        position_ids: int64 (B, T).
        visible: bool (B, 1, T, K), True where a column attends to a cached slot, or what the
            attention function takes in its place.
        cache: receives the new keys and values and returns K slots.
        num_logits: columns, counted from the right, whose logits are wanted.

    Returns:
        (B, num_logits, V) in the model's dtype.
    """
    cache_name, keeps_logits = _forward_signature(type(model))
    keep = {"logits_to_keep": num_logits} if keeps_logits else {}
    output = model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=visible,
        use_cache=True,
        **{cache_name: cache},
        **keep,
    )
    return output.logits[:, -num_logits:]


def hidden_states(
    model: PreTrainedModel,
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    visible: torch.Tensor,
    cache: ExternalCache,
) -> torch.Tensor:
    """Run the decoder of a stock model without its output layer; arguments of `cached_forward`.

    Returns:
        (B, T, D), the last hidden states.
    """
    decoder: Any = model.get_decoder()
    cache_name, _ = _forward_signature(type(decoder))
    return decoder(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=visible,
        use_cache=True,
        **{cache_name: cache},
    ).last_hidden_state


@lru_cache
def _forward_signature(model_class: type[PreTrainedModel]) -> tuple[str, bool]:
    """Find out what the forward calls its cache, and whether it can skip unneeded logits."""
    parameters = inspect.signature(model_class.forward).parameters
    cache_name = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
    if cache_name is None:
        raise TypeError(
            f"{model_class.__name__}.forward takes none of {_CACHE_ARGUMENTS}: unknown release of "
            "transformers?"
        )
    return cache_name, "logits_to_keep" in parameters
