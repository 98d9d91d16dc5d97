"""Random models of given shapes, random adapters, and a tokenizer that takes its time.

What a step costs depends on shapes, not on what the weights say.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from mars.decoding.prompts import text_decoder
from mars.gated import GatedAdapter, GatedConfig, all_linear

WINDOW = 4
_RANK, _HEAD_WIDTH = 14, 256  # of the default model's adapter

# Published hyperparameters of Qwen2.5-0.5B and Qwen2.5-7B; `tiny` is for trying the script.
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 49152,  # the ids of recorded answers
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
FAMILIES = ("qwen2", "llama", "qwen3", "mistral", "olmo2", "phi3")


@dataclass(kw_only=True)
class Subject:
    """A model to measure."""

    name: str
    model: PreTrainedModel
    """With a gated adapter."""
    stock: PreTrainedModel
    """The same weights in the same memory, without adapter and hooks."""
    decode: Callable[[list[int]], str] = field(repr=False)
    """Turns tokens into text, and costs what that costs."""

    @property
    def device(self) -> torch.device:
        return self.model.device


def qwen2_subject(shape: str, device: torch.device, dtype: torch.dtype) -> Subject:
    """Make a random Qwen2 of a shape of `SHAPES`."""
    config = Qwen2Config(
        **SHAPES[shape],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    rank, width = (_RANK, _HEAD_WIDTH) if shape != "tiny" else (4, 16)
    return _subject(shape, config, device, dtype, rank, width)


def tiny_subject(family: str, device: torch.device) -> Subject:
    """Make a random two-layer model in float32, whose choices are varied."""
    config = AutoConfig.for_model(
        family,
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        sliding_window=None,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return _subject(family, config, device, torch.float32, rank=4, width=16)


def _subject(
    name: str, config: Any, device: torch.device, dtype: torch.dtype, rank: int, width: int
) -> Subject:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    stock = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    _attach_adapter(model, rank, width)
    return Subject(name=name, model=model, stock=stock, decode=stand_in_decoder(config.vocab_size))


def _attach_adapter(model: PreTrainedModel, rank: int, width: int) -> None:
    """Attach a random gated adapter with a draft head, of the precision of the model."""
    config = GatedConfig(
        base=None,
        fingerprint="",
        block_size=WINDOW,
        rank=rank,
        targets=all_linear(model),
        mask_embeddings=WINDOW,
        head_width=width,
    )
    adapter = GatedAdapter(model, config)
    for parameter in adapter.parameters():
        nn.init.normal_(parameter, std=0.02)
    adapter.to(model.dtype).requires_grad_(False)


def stand_in_decoder(vocabulary: int) -> Callable[[list[int]], str]:
    """Return what turns ids into made-up words: as fast as a real tokenizer, which it is."""
    words = {f"\u0120w{number}": number for number in range(vocabulary)}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return text_decoder(PreTrainedTokenizerFast(tokenizer_object=backend))
