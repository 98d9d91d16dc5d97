"""The gated adapter: LoRA and mask embeddings that act at mask positions only.

Everywhere else the model computes what it computed before, bit by bit: the hooks below do not
touch the outputs of other columns. So the AR mode needs no training and cannot lose anything
(gated LoRA: Samragh et al., arXiv 2507.11851; design, section 3).

The base model stays a stock model with its own parameter names; the adapter is a module beside
it. A folder with `adapter.safetensors` and `mars_adapter.json` holds everything.

Shapes: B rows, T columns, M mask columns (the last ones), D width, r rank.
"""

import hashlib
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars.draft_head import Correction, DraftHead
from mars.engine.kernels.linear import add_lora, linear_path
from mars.errors import UserError
from mars.mask_token import input_embedding

FORMAT_VERSION = 1
CONFIG_FILE = "mars_adapter.json"
WEIGHTS_FILE = "adapter.safetensors"
_SAMPLES = 4096  # values per tensor that the fingerprint looks at

_adapters: WeakKeyDictionary[PreTrainedModel, "GatedAdapter"] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedConfig:
    """Contents of `mars_adapter.json`."""

    base: str | None
    """Hub id or folder of the base model; None is the default model."""
    fingerprint: str
    """`fingerprint` of the base model's weights."""
    block_size: int
    """Masks per block in training (B); the largest window in decoding."""
    rank: int
    """Rank of the LoRA matrices (r)."""
    targets: tuple[str, ...]
    """Last parts of the names of the linear layers that have a LoRA."""
    mask_embeddings: int
    """1: all masks share an embedding; block_size: one for each offset."""
    head_width: int = 0
    """Hidden width of the `DraftHead`; 0: there is none."""
    format_version: int = FORMAT_VERSION
    """Raised when the meaning of the folder changes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        least = {"block_size": 1, "rank": 1, "mask_embeddings": 1, "head_width": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise UserError(f"{name} must be an integer of at least {low}, got {value!r}.")
        if self.mask_embeddings not in (1, self.block_size):
            raise UserError(
                f"mask_embeddings must be 1 or the block size {self.block_size}, got "
                f"{self.mask_embeddings}."
            )


class GatedAdapter(nn.Module):
    """LoRA matrices of a model's linear layers, and embeddings of its masks.

    Attributes:
        config: what it was made with.
        head: corrects drafts one after the other, or None.
        mask_embedding: (1 or block_size, D).
        lora_a: A, from inputs to r, per adapted layer, in the order of `layer_names`.
        lora_b: B, from r to outputs; zero at first, so training starts from the base model.
        layer_names: names of the adapted layers in the base model.
    """

    def __init__(self, model: PreTrainedModel, config: GatedConfig) -> None:
        """Make an untrained adapter for `model`, in float32, and attach it.

        Raises:
            UserError: the model has an adapter already, or no linear layer of a target's name.
        """
        if model in _adapters:
            raise UserError("The model already has a gated adapter. Load the base model again.")
        super().__init__()
        self.config = config
        layers = _linear_layers(model, config.targets)
        self.layer_names = list(layers)
        device = model.device
        made = {"bias": False, "device": device}
        rank, linears = config.rank, layers.values()
        self.lora_a = nn.ModuleList(nn.Linear(x.in_features, rank, **made) for x in linears)
        self.lora_b = nn.ModuleList(nn.Linear(rank, x.out_features, **made) for x in linears)
        for _, b in self._pairs():
            nn.init.zeros_(b.weight)
        weight = input_embedding(model).weight.detach()
        self.head: DraftHead | None = None
        if config.head_width:
            self.head = DraftHead(weight.shape[1], config.head_width).to(device)
        mean = weight.float().mean(0, keepdim=True)  # of all starts the best: docs/log.md
        self.mask_embedding = nn.Parameter(mean.repeat(config.mask_embeddings, 1))
        self.start: int | None = None  # first mask column of the forward that runs
        self._offset_BM: Tensor | None = None
        self._attach(model, list(layers.values()))

    @contextmanager
    def columns(self, start: int, offset_BM: Tensor) -> Generator[None]:
        """Act on the columns from `start` on, inside the block; see `mask_columns`."""
        self.start, self._offset_BM = start, offset_BM
        try:
            yield
        finally:
            self.start = self._offset_BM = None

    def layers(self) -> Iterator[tuple[str, tuple[nn.Linear, nn.Linear]]]:
        """Yield the name of every adapted layer, and its A and B."""
        yield from zip(self.layer_names, self._pairs(), strict=True)

    def owns(self, hook: object) -> bool:
        """Whether a forward hook of the base model is this adapter's."""
        return hook == self._embed_masks or getattr(hook, "adapter", None) is self

    def save(self, folder: str | Path) -> None:
        """Write the adapter's two files, weights in bfloat16."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = self._named()
        tensors = {n: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in tensors.items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(asdict(self.config), indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text)

    def _pairs(self) -> Iterator[tuple[nn.Linear, nn.Linear]]:
        """Yield A and B of every adapted layer."""
        for a, b in zip(self.lora_a, self.lora_b, strict=True):
            assert isinstance(a, nn.Linear)
            assert isinstance(b, nn.Linear)
            yield a, b

    def _named(self) -> dict[str, Tensor]:
        """Name the parameters as they are saved: by the layer of the base model they belong to."""
        named: dict[str, Tensor] = {"mask_embedding": self.mask_embedding}
        for name, (a, b) in self.layers():
            named |= {f"{name}.lora_a": a.weight, f"{name}.lora_b": b.weight}
        if self.head is not None:
            named |= {f"head.{name}": p for name, p in self.head.named_parameters()}
        return named

    def load(self, path: Path, dtype: torch.dtype, *, new_head: bool = False) -> None:
        """Fill in the weights that `save` wrote; with `new_head`, the file may be without a head.

        Raises:
            UserError: the file is damaged or belongs to another adapter.
        """
        try:
            tensors = load_file(path)
        except Exception as error:  # missing, cut short, no safetensors file
            raise UserError(f"Cannot read {path}: {error}. Save the adapter again.") from error
        wanted = self._named()
        if "mask_embedding" not in tensors:
            raise UserError(f"{path} lacks the mask embeddings. Save the adapter again.")
        if new_head and not any(name.startswith("head.") for name in tensors):
            wanted = {n: p for n, p in wanted.items() if not n.startswith("head.")}
        for name in sorted(set(wanted) ^ set(tensors)):
            kind = "lacks" if name in wanted else "has an unknown tensor"
            raise UserError(f"{path} {kind} {name!r}. Save the adapter again.")
        for name, parameter in wanted.items():
            if tensors[name].shape != parameter.shape:
                raise UserError(
                    f"{path}: {name!r} has shape {tuple(tensors[name].shape)}, but the model needs "
                    f"{tuple(parameter.shape)}."
                )
            parameter.data = tensors[name].to(parameter.device, dtype)

    def _attach(self, model: PreTrainedModel, layers: list[nn.Linear]) -> None:
        for layer, (a, b) in zip(layers, self._pairs(), strict=True):
            layer.register_forward_hook(_LoraHook(self, a, b))
        input_embedding(model).register_forward_hook(self._embed_masks)
        _adapters[model] = self

    def _embed_masks(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if self._offset_BM is None or self._offset_BM.shape[1] == 0:
            return output
        index = self._offset_BM if self.config.mask_embeddings > 1 else self._offset_BM * 0
        masks = self.mask_embedding[index].to(output.dtype)
        return torch.cat([output[:, : self.start], masks], dim=1)


class _LoraHook:
    """Add B A x to the mask columns of a linear layer's output."""

    def __init__(self, adapter: GatedAdapter, a: nn.Linear, b: nn.Linear) -> None:
        self.adapter, self._a, self._b = adapter, a, b

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        start = self.adapter.start
        if start is None or start == output.shape[1]:
            return output
        if torch.is_grad_enabled():
            delta = self._b(self._a(inputs[0][:, start:]))
            if start == 0:
                return output + delta
            return torch.cat([output[:, :start], output[:, start:] + delta], dim=1)
        if not add_lora(self._a, self._b, inputs[0], output, start):
            inner = self._a(inputs[0][:, start:].to(self._a.weight.dtype))
            weight = self._b.weight.mT.expand(len(inner), -1, -1)
            # Product and sum are one call, and round once; but autocast leaves weights as they are.
            if inner.dtype == output.dtype == weight.dtype:
                output[:, start:].baddbmm_(inner, weight)
            else:
                output[:, start:].add_(inner @ weight)
        return output


def correction(model: PreTrainedModel, hidden_BMD: Tensor) -> Correction | None:
    """Return what the model's draft head needs, given the masks' last hidden states."""
    adapter = _adapters.get(model)
    if adapter is None or adapter.head is None:
        return None
    output: Any = model.get_output_embeddings()
    return Correction(hidden_BMD, adapter.head, input_embedding(model).weight, output.weight)


@contextmanager
def correction_of(model: PreTrainedModel) -> Generator[list[Correction]]:
    """Collect the hidden states that the draft head needs from a forward in the block.

    Yields:
        A list that holds one `Correction` afterwards, for mask columns; empty without a head.
    """
    adapter, found = _adapters.get(model), []
    if adapter is None or adapter.head is None:
        yield found
        return

    def keep(module: nn.Module, inputs: Any, decoded: Any) -> None:
        made = correction(model, decoded.last_hidden_state[:, adapter.start :])
        assert made is not None
        found.append(made)

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def mask_columns(model: PreTrainedModel, start: int, offset_BM: Tensor) -> Generator[None]:
    """Tell a model's gated adapter, if it has one, which columns of the next forward are masks.

    Args:
        model: any model.
        start: index of the first mask column; the columns from there on are masks.
        offset_BM: int64, place of each mask in its block, from 0.
    """
    adapter = _adapters.get(model)
    if adapter is None:
        yield
        return
    with adapter.columns(start, offset_BM):
        yield


def attached_adapter(model: PreTrainedModel) -> GatedAdapter | None:
    """Return the adapter of a model."""
    return _adapters.get(model)


def is_adapter_folder(folder: str | Path) -> bool:
    """Whether a folder holds a gated adapter."""
    return (Path(folder) / CONFIG_FILE).is_file()


def read_config(folder: str | Path) -> GatedConfig:
    """Read `mars_adapter.json`.

    Raises:
        UserError: there is none, or it is damaged or of another release.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"{str(folder)!r} holds no gated adapter: there is no {CONFIG_FILE}. "
            "Train one with `mars train --method gated`."
        )
    try:
        entries = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from error
    known = {field.name for field in fields(GatedConfig)}
    is_readable = isinstance(entries, dict) and set(entries) == known
    if not is_readable or entries["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{path} does not hold the entries {sorted(known)} of format version {FORMAT_VERSION}. "
            "Update mars-lm, or train the adapter again."
        )
    return GatedConfig(**entries)


def load_adapter(model: PreTrainedModel, folder: str | Path, *, base: str) -> GatedAdapter:
    """Attach the adapter in `folder` to the model it was trained for.

    Args:
        model: its base model.
        folder: of `GatedAdapter.save`.
        base: what the caller calls the model, for messages.

    Raises:
        UserError: the adapter belongs to other weights, or its files are damaged.
    """
    config = read_config(folder)
    check_base(model, config, folder, base=base)
    adapter = GatedAdapter(model, config)
    # On a CPU, small products take half the time in float32 (docs/log.md), except by our kernel,
    # which serves the LoRA.
    is_cpu = model.device.type == "cpu"
    dtype = torch.float32 if is_cpu and not linear_path(model.dtype) else model.dtype
    adapter.load(Path(folder) / WEIGHTS_FILE, dtype)
    if adapter.head is not None and is_cpu:
        adapter.head.float()
    adapter.requires_grad_(False)
    return adapter


def check_base(
    model: PreTrainedModel, config: GatedConfig, folder: str | Path, *, base: str
) -> None:
    """Refuse an adapter that was trained for other weights."""
    found = fingerprint(model)
    if found != config.fingerprint:
        trained_for = "the default model" if config.base is None else repr(config.base)
        raise UserError(
            f"The adapter in {str(folder)!r} was trained for {trained_for} (fingerprint "
            f"{config.fingerprint[:12]}); the weights of {base!r} have fingerprint {found[:12]}. "
            "Load it with its own base model, or train an adapter for this one: "
            "`mars train --method gated`."
        )


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Return a SHA-256 of the weights' names, shapes and evenly spaced values.

    Values are compared as bfloat16, so that the precision a model is loaded with does not matter.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        values = flat[:: max(1, len(flat) // _SAMPLES)].to(torch.bfloat16).cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def all_linear(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of all linear layers of the decoder (last parts, each once)."""
    return tuple(dict.fromkeys(name.rsplit(".", 1)[-1] for name, _ in _decoder_layers(model)))


def _decoder_layers(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    head = model.get_output_embeddings()
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def _linear_layers(model: PreTrainedModel, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    layers = {n: m for n, m in _decoder_layers(model) if n.rsplit(".", 1)[-1] in targets}
    known = all_linear(model)
    if missing := [name for name in targets if name not in known]:
        raise UserError(
            f"The model has no linear layer named {missing[0]!r}. It has: {', '.join(known)}."
        )
    return layers
