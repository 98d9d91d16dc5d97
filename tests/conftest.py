"""Tiny random models and a byte-level tokenizer: what the fast tests need, without network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from mars.checkpoint import Checkpoint, MarsConfig
from mars.decoding.plan import RowPlan
from mars.decoding.planner import Planner
from mars.engine.decoder import FusedDecoder
from mars.engine.runner import Runner
from mars.engine.step_times import Seconds, StepTimes

torch.set_num_threads(max(1, min(2, torch.get_num_threads())))

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "olmo2", "phi3"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer: 4 special tokens, then one token per byte."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|mask|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(family: str = "llama", *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Build a random two-layer model; weights are scaled up so that its choices are varied."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 260,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "initializer_range": 0.3,
            **overrides,
        },
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(autouse=True)
def cheap_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as on a machine where columns cost little: times of tiny models would say nothing.

    The clock of the planner stands still, so that plans do not depend on this machine's hour.
    """
    times = StepTimes(
        {1: Seconds({0: 0.010, 32: 0.012}, {}), 64: Seconds({0: 0.020, 256: 0.036}, {})}
    )
    monkeypatch.setattr("mars.decoding.scheduler.step_times", lambda *_: times)

    def learn(planner: Planner, plans: Sequence[RowPlan], committed: int, *_: object) -> None:
        planner._clock.is_set = True
        learn_without(planner, plans, committed, None)

    learn_without = Planner.learn
    monkeypatch.setattr("mars.decoding.scheduler.Planner.learn", learn)


@pytest.fixture
def stock_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run models through their own forward where our decoder could."""
    monkeypatch.setattr(FusedDecoder, "of", lambda *_: None)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[..., Checkpoint]:
    """Return a factory of checkpoints whose mask token is id 3 and whose block size is 4."""

    def make(family: str = "llama", *, block_size: int = 4, **overrides: object) -> Checkpoint:
        return Checkpoint(
            model=make_model(family, **overrides),
            tokenizer=tiny_tokenizer,
            name=f"tiny-{family}",
            mars=MarsConfig(block_size=block_size, mask_token_id=3, adapter="full"),
        )

    return make


def slots_of(runner: Runner, of_keys: bool) -> list[torch.Tensor]:
    """Return the keys or values in the cache of a model, (rows, heads, slots, width) per layer."""
    cache = runner.cache
    tensors = cache.keys if of_keys else cache.values
    if cache.unit == 1:
        return tensors
    assert tensors[0].dtype == torch.float32, "the units of matrix tiles look different"
    units = [x.unflatten(-1, (-1, cache.unit) if of_keys else (cache.unit, -1)) for x in tensors]
    return [(x.mT if of_keys else x).flatten(2, 3) for x in units]
