"""Load and save checkpoints, and choose the mask token.

A MARS checkpoint is a Hugging Face checkpoint: same model_type, same parameter names. Its
config.json gains one block, `mars`, which every other program ignores.
"""

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mars.default_model import ensure_default_model
from mars.errors import UserError

FORMAT_VERSION = 1
RESERVED_NAME = re.compile(r"mask|reserved|unused|extra_id|placeholder|dummy", re.IGNORECASE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class MarsConfig:
    """The `mars` block of config.json."""

    block_size: int
    """Masks per block in training (the paper's B); the largest window in decoding."""
    mask_token_id: int
    """Row of the input embedding that stands for [MASK]."""
    adapter: Literal["full", "lora"] = "full"
    """How the checkpoint was trained."""
    format_version: int = FORMAT_VERSION
    """Raised when the meaning of this block changes."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UserError(f"block_size must be at least 1, got {self.block_size}.")

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> "MarsConfig | None":
        """Read the block of a model config; None for a plain AR model."""
        block = getattr(config, "mars", None)
        if block is None:
            return None
        known = {field.name for field in fields(cls)}
        is_readable = isinstance(block, dict) and known == set(block)
        if not is_readable or block["format_version"] != FORMAT_VERSION:
            raise UserError(
                f"The `mars` block of config.json is {block!r}; this release reads format version "
                f"{FORMAT_VERSION} with the entries {sorted(known)}. Update mars-lm, or save the "
                "checkpoint again."
            )
        numbers = (block["block_size"], block["mask_token_id"])
        if not all(isinstance(number, int) for number in numbers):
            raise UserError(
                f"block_size and mask_token_id of the `mars` block must be integers, got {numbers}."
            )
        mars = cls(**block)
        if not 0 <= mars.mask_token_id < config.vocab_size:
            raise UserError(
                f"mask_token_id {mars.mask_token_id} lies outside the vocabulary of "
                f"{config.vocab_size} tokens. Correct the `mars` block of config.json."
            )
        return mars


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A model with its tokenizer and, once trained for several tokens, its MARS settings."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    mars: MarsConfig | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end an answer: the generation config's and the tokenizer's."""
        return _eos_token_ids(getattr(self.model, "generation_config", None), self.tokenizer)

    @property
    def mask_token_id(self) -> int:
        """The mask token; UserError for a model that was never trained to predict from masks."""
        if self.mars is None:
            raise UserError(
                f"{self.name!r} is a plain AR model: it was not trained to predict from masks. "
                "Use mode 'ar', or train it first with `mars train`."
            )
        return self.mars.mask_token_id

    @property
    def context_length(self) -> int | None:
        """Largest number of positions the model was built for; None if the config is silent."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def save(self, folder: str | Path) -> None:
        """Write model, tokenizer and `mars` block as an ordinary Hugging Face folder."""
        if self.mars is not None:
            self.model.config.mars = asdict(self.mars)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def load(
    name: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
) -> Checkpoint:
    """Load a checkpoint for decoding or training.

    Args:
        name: a hub id, a local folder (of a model or of a LoRA adapter), or None for the
            default model, which is fetched on first use.
        dtype: torch dtype or its name.
        device: where to put it; None takes the GPU if there is one.

    Raises:
        UserError: unknown name or dtype, unsupported architecture, damaged `mars` block.
    """
    source = str(ensure_default_model() if name is None else name)
    torch_dtype = parse_dtype(dtype)
    config = _from_pretrained(AutoConfig, source)
    check_supported(config)
    mars = MarsConfig.from_config(config)
    if (Path(source) / "adapter_config.json").exists():
        model = _load_lora(source, torch_dtype)
    else:
        model = _from_pretrained(AutoModelForCausalLM, source, dtype=torch_dtype)
    tokenizer = _from_pretrained(AutoTokenizer, source)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.nn.Module.to(model, device)
    return Checkpoint(
        model=model.eval(),
        tokenizer=tokenizer,
        name="default model" if name is None else str(name),
        mars=mars,
    )


def load_tokenizer(
    name: str | Path | None = None,
) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """Load what preparing data needs: the tokenizer and the ids that end an answer."""
    source = str(ensure_default_model() if name is None else name)
    tokenizer = _from_pretrained(AutoTokenizer, source)
    try:
        generation_config = GenerationConfig.from_pretrained(source)
    except OSError:  # optional in a checkpoint
        generation_config = None
    return tokenizer, _eos_token_ids(generation_config, tokenizer)


def _eos_token_ids(
    generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    listed = getattr(generation_config, "eos_token_id", None)
    ids = set(listed if isinstance(listed, list | tuple) else [listed])
    return frozenset(i for i in ids | {tokenizer.eos_token_id} if i is not None)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Turn a name such as 'bfloat16' into a torch dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise UserError(f"Unknown dtype {dtype!r}. Use one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _from_pretrained(auto_class: Any, source: str, **kwargs: Any) -> Any:
    """Call from_pretrained and turn its many exceptions into one clear message."""
    try:
        return auto_class.from_pretrained(source, **kwargs)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        kind = "folder" if Path(source).is_dir() else "local folder or hub id"
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"Cannot load {source!r} as a {kind} of a causal language model: {first_line}"
        ) from error


def _load_lora(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the base model of a LoRA folder and merge the adapter into it."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise UserError(
            f"{folder!r} holds a LoRA adapter: pip install 'mars-lm[train]'."
        ) from error

    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not base:
        raise UserError(f"{folder}/adapter_config.json does not name its base model.")
    model = _from_pretrained(AutoModelForCausalLM, base, dtype=dtype)
    rows = _from_pretrained(AutoConfig, folder).vocab_size
    if input_embedding(model).num_embeddings < rows:  # the mask needed a row of its own
        add_embedding_row(model)
    merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
    merged.config.mars = _from_pretrained(AutoConfig, folder).mars
    return merged


def check_supported(config: PretrainedConfig) -> None:
    """Refuse architectures whose decoding step is not plain full attention.

    Raises:
        UserError: encoder-decoder, sliding-window or linear attention, or rotary scaling that
            depends on the longest row of the batch (a row would then depend on its neighbours).
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name!r} is an encoder-decoder model; MARS needs a decoder-only model.")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise UserError(
            f"{name!r} uses sliding-window attention (sliding_window={window}), which is not "
            "supported yet. If its texts stay shorter than the window, set "
            "`sliding_window: null` in config.json."
        )
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"}:
        raise UserError(
            f"{name!r} has layers of type {sorted(layers - {'full_attention'})}; only full "
            "attention is supported so far."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise UserError(
            f"{name!r} scales its rotary embedding by the longest row of a batch "
            f"(rope_type={rope['rope_type']!r}), which is not supported yet."
        )


def prepare_for_training(
    checkpoint: Checkpoint,
    *,
    block_size: int,
    adapter: Literal["full", "lora"],
    mask_token_id: int | None = None,
) -> None:
    """Give the checkpoint a mask token and its `mars` block (in place).

    A checkpoint that already has a mask keeps it. `mask_token_id` overrides the choice.
    """
    if checkpoint.mars is not None and mask_token_id is None:
        mask_token_id = checkpoint.mars.mask_token_id
    if mask_token_id is None:
        mask_token_id = choose_mask_token(checkpoint.model, checkpoint.tokenizer)
    rows = input_embedding(checkpoint.model).num_embeddings
    if not 0 <= mask_token_id < rows:
        raise UserError(
            f"mask_token_id {mask_token_id} lies outside the vocabulary of {rows} tokens. "
            f"Give an id from 0 to {rows - 1}, or leave it out to have one chosen."
        )
    if mask_token_id in checkpoint.eos_token_ids:
        raise UserError(f"mask_token_id {mask_token_id} ends an answer; choose an unused token.")
    checkpoint.mars = MarsConfig(
        block_size=block_size, mask_token_id=mask_token_id, adapter=adapter
    )
    checkpoint.model.config.mars = asdict(checkpoint.mars)


def choose_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Find an unused vocabulary entry for the mask, or add one row.

    Order: the tokenizer's own mask token; a special token whose name says it is reserved; a
    special token that was never trained (its embedding equals another special token's); a row
    of the embedding matrix beyond the tokenizer's last id; a new row. The row is set to the mean
    embedding: on the default model an untouched one starts at 16 nats a token, the mean at 6.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    token = _unused_token(model, tokenizer)
    if token is None:
        return add_embedding_row(model)
    _initialise_row(model, token)
    return token


def _unused_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return an id that no text is ever encoded to, if the vocabulary has one."""
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    template = str(tokenizer.chat_template or "")
    spare = {
        i: token.content
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special and i not in used and token.content not in template
    }
    reserved = [i for i, content in spare.items() if RESERVED_NAME.search(content)]
    if reserved:
        return reserved[-1]
    weight = input_embedding(model).weight.detach()
    untrained = _rows_with_a_twin(weight, sorted(spare))
    if untrained:
        return untrained[-1]
    return len(tokenizer) if len(tokenizer) < weight.shape[0] else None


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


def output_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the layer that makes logits of hidden states."""
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
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
        weight = layer.weight
        weight[row] = 0
        weight[row] = (weight.float().sum(0) / (len(weight) - 1)).to(weight.dtype)
