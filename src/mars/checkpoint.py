"""Load and save checkpoints, and prepare them for training.

A MARS checkpoint is a Hugging Face checkpoint: same model_type, same parameter names. Its
config.json gains one block, `mars`, which every other program ignores.
"""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

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

from mars.compat import takes_attention_functions
from mars.default_model import ensure_default_model
from mars.engine.kernels.linear import linear_path
from mars.errors import UserError
from mars.gated import GatedAdapter, is_adapter_folder, load_adapter, read_config
from mars.mask_token import (
    add_embedding_row,
    check_mask_token,
    choose_mask_token,
    input_embedding,
)

FORMAT_VERSION = 1
Adapter = Literal["full", "lora", "gated"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What damaged or wrong files make the libraries raise (JSON errors are ValueErrors).
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, RuntimeError),
    *(SafetensorError, UserWarning),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarsConfig:
    """The `mars` block of config.json."""

    block_size: int
    """Masks per block in training (the paper's B); the largest window in decoding."""
    mask_token_id: int | None
    """Row of the input embedding that stands for [MASK]; None for `gated`, whose masks are no
    tokens."""
    adapter: Adapter = "full"
    """How the checkpoint was trained."""
    format_version: int = FORMAT_VERSION
    """Raised when the meaning of this block changes."""

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("mask_token_id", 0)):
            value = getattr(self, name)
            if name == "mask_token_id" and value is None and self.adapter == "gated":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"{name} must be an integer of at least {least}, got {value!r}.")
        if self.adapter not in get_args(Adapter):
            raise UserError(
                f"adapter must be one of {', '.join(get_args(Adapter))}, got {self.adapter!r}."
            )

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
        mars = cls(**block)
        if mars.mask_token_id is None or mars.mask_token_id >= config.vocab_size:
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
    adapter: GatedAdapter | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end an answer: the generation config's and the tokenizer's."""
        return _eos_token_ids(getattr(self.model, "generation_config", None), self.tokenizer)

    @property
    def mask_token_id(self) -> int | None:
        """The mask token, None if masks are no tokens; UserError for a plain AR model."""
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
        """Write model, tokenizer and `mars` block as an ordinary Hugging Face folder.

        With a gated adapter only the adapter is written: the base model is as it was.
        """
        if self.adapter is not None:
            self.adapter.save(folder)
            return
        _write_block(self.model.config, self.mars)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def load(
    name: str | Path | None = None,
    *,
    adapter: str | Path | None = "auto",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
) -> Checkpoint:
    """Load a checkpoint for decoding or training.

    Args:
        name: a hub id, a local folder (of a model, of a LoRA adapter or of a gated adapter, which
            knows its base), or None for the default model, which is fetched on first use.
        adapter: folder of a gated adapter for this model; "auto" takes the one shipped with the
            package if the default model is meant; None takes none.
        dtype: torch dtype or its name. "auto" is the one the weights are stored in; float32 for
            half precision on a processor that has no arithmetic, or we no kernels, for it.
        device: where to put it; None takes the GPU if there is one.

    Raises:
        UserError: unknown name or dtype, unsupported architecture, damaged `mars` block, an adapter
            for other weights.
    """
    if name is not None and is_adapter_folder(name):
        if adapter not in ("auto", None):
            raise UserError(f"{name} is itself a gated adapter: name its base model, or no other.")
        name, adapter = read_config(name).base, name
    if adapter == "auto":
        adapter = shipped_adapter() if name is None else None
    source = _source(name)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = _from_pretrained(AutoConfig, source)
    torch_dtype = _best_dtype(config, device) if dtype == "auto" else parse_dtype(dtype)
    check_supported(config)
    mars = MarsConfig.from_config(config)
    if (Path(source) / "adapter_config.json").exists():
        model = _load_lora(source, torch_dtype)
    else:
        model = _load_model(source, torch_dtype)
    _generation_config(source)  # loading a model passes over a damaged one in silence
    tokenizer = _from_pretrained(AutoTokenizer, source)
    torch.nn.Module.to(model, device)
    checkpoint = Checkpoint(
        model=model.eval(),
        tokenizer=tokenizer,
        name="default model" if name is None else str(name),
        mars=mars,
    )
    if adapter is not None:
        attach(checkpoint, load_adapter(model, adapter, base=checkpoint.name))
    return checkpoint


def attach(checkpoint: Checkpoint, adapter: GatedAdapter) -> None:
    """Make a gated adapter of its model part of a checkpoint (in place)."""
    checkpoint.adapter = adapter
    checkpoint.mars = MarsConfig(
        block_size=adapter.config.block_size, mask_token_id=None, adapter="gated"
    )


def shipped_adapter() -> Path | None:
    """Return the folder of the adapter for the default model that comes with the package."""
    folder = Path(__file__).parent / "default_adapter"
    return folder if is_adapter_folder(folder) else None


def load_tokenizer(
    name: str | Path | None = None,
) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """Load what preparing data needs: the tokenizer and the ids that end an answer."""
    source = _source(name)
    tokenizer = _from_pretrained(AutoTokenizer, source)
    return tokenizer, _eos_token_ids(_generation_config(source), tokenizer)


def _source(name: str | Path | None) -> str:
    """Return what `from_pretrained` shall read: a folder or a hub id."""
    source = str(ensure_default_model() if name is None else name)
    if Path(source).is_file():
        raise UserError(f"{source!r} is a file. Name the folder of the checkpoint, or a hub id.")
    return source


def _generation_config(source: str) -> GenerationConfig | None:
    """Read generation_config.json, which a checkpoint need not have."""
    try:
        with _readable(source):
            return GenerationConfig.from_pretrained(source)
    except UserError:
        if (Path(source) / "generation_config.json").is_file():
            raise
        return None


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


def _best_dtype(config: Any, device: torch.device) -> torch.dtype:
    """Return the precision that weights are stored in, if the device computes in it."""
    stored: torch.dtype | None = getattr(config, "dtype", None)
    if device.type == "cpu" and (stored != torch.bfloat16 or not linear_path(stored)):
        return torch.float32
    return torch.float32 if stored is None else stored


def _from_pretrained(auto_class: Any, source: str, **kwargs: Any) -> Any:
    with _readable(source):
        return auto_class.from_pretrained(source, **kwargs)


def _load_model(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model, all of whose weights must be there: missing ones would be random."""
    model, info = _from_pretrained(
        AutoModelForCausalLM, source, dtype=dtype, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"{source!r} lacks {len(missing)} of the model's weights, {missing[0]!r} for one. "
            "Fetch or save the checkpoint again."
        )
    return model


@contextmanager
def _readable(source: str) -> Generator[None]:
    """Turn the many exceptions of reading a checkpoint into one clear message."""
    try:
        yield
    except UserError:
        raise
    except _UNREADABLE as error:
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

    base = _from_pretrained(PeftConfig, folder).base_model_name_or_path
    if not base:
        raise UserError(f"{folder}/adapter_config.json does not name its base model.")
    model = _load_model(base, dtype)
    config = _from_pretrained(AutoConfig, folder)
    if input_embedding(model).num_embeddings < config.vocab_size:  # the mask needed its own row
        add_embedding_row(model)
    with _readable(folder), warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")  # they would be random
        merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
    _write_block(merged.config, MarsConfig.from_config(config))
    return merged


def check_supported(config: PretrainedConfig) -> None:
    """Refuse architectures whose decoding step is not plain full attention.

    Raises:
        UserError: encoder-decoder, sliding-window or linear attention, attention that cannot be
            replaced, or rotary scaling that depends on the longest row of the batch (a row would
            then depend on its neighbours).
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
    if not takes_attention_functions(config):
        raise UserError(
            f"{name!r} is no causal language model whose attention can be replaced through the "
            "attention interface of transformers. Use a newer architecture, such as Llama or Qwen."
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
    adapter: Adapter,
    mask_token_id: int | None = None,
) -> None:
    """Give the checkpoint a mask token and its `mars` block (in place).

    A checkpoint that already has a mask keeps it. `mask_token_id` overrides the choice; its
    embedding is left as it is.

    Raises:
        UserError: the given id is outside the vocabulary, or text is encoded to it.
    """
    model, tokenizer, ends = checkpoint.model, checkpoint.tokenizer, checkpoint.eos_token_ids
    if mask_token_id is not None:
        check_mask_token(model, tokenizer, mask_token_id, ends=ends)
    elif checkpoint.mars is not None:
        mask_token_id = checkpoint.mars.mask_token_id
    else:
        mask_token_id = choose_mask_token(model, tokenizer, ends=ends)
    checkpoint.mars = MarsConfig(
        block_size=block_size, mask_token_id=mask_token_id, adapter=adapter
    )
    _write_block(model.config, checkpoint.mars)


def _write_block(config: Any, mars: MarsConfig | None) -> None:
    """Make the `mars` block of a config that of `mars`; None leaves it without."""
    if mars is not None:
        config.mars = asdict(mars)
    elif hasattr(config, "mars"):
        del config.mars
