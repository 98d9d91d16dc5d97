"""A stock decoder of the Llama kind in one call of `decoder.c`: bf16 or fp32, on the CPU.

It computes what the stock model computes, from token ids to logits, with the model's own weights;
only the order of additions differs. What it cannot do exactly so, it leaves to the stock forward.

Shapes: N columns of all rows, without padding; O of them with outputs; D width, V vocabulary.
"""

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars.decoding.plan import FlatColumns
from mars.engine.cache import SlotCache
from mars.engine.kernels.compiler import load_kernels
from mars.engine.kernels.linear import (
    TILES,
    PackedLinears,
    PackedSample,
    linear_path,
    packed_layer,
)
from mars.gated import GatedAdapter, attached_adapter

# Their layers are the same but for biases and norms of heads, which are looked for.
_KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
PHASES = ("linear layers", "attention", "output layer", "other")
"""What the time of a forward goes into, in the order of decoder.c."""
_decoders: WeakKeyDictionary[PreTrainedModel, "FusedDecoder"] = WeakKeyDictionary()  # the latest
_UNIT = 32  # the feed-forward width must be a multiple; slots in a cache unit


class _Linear(ctypes.Structure):
    """`struct linear` of decoder.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("main", "lora_a", "lora_b"))


class _Block(ctypes.Structure):
    """`struct block`."""

    _fields_ = (
        ("linears", _Linear * len(_LINEARS)),
        *((f"{name}_norm", ctypes.c_void_p) for name in ("attention", "mlp", "query", "key")),
    )


class _Decoder(ctypes.Structure):
    """`struct decoder`."""

    _fields_ = (
        ("blocks", ctypes.POINTER(_Block)),
        *(
            (name, ctypes.c_void_p)
            for name in ("embedding", "mask_embedding", "final_norm", "head")
        ),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "width", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_width", "inner", "in_units")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    )


class _Step(ctypes.Structure):
    """`struct step`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_void_p) for name in ("token", "position", "slot", "limit", "first")),
        *((name, ctypes.c_void_p) for name in ("mask_index", "real_start", "mask_start", "place")),
        *((name, ctypes.c_void_p) for name in ("output", "hidden", "logits", "spent")),
        *((name, ctypes.c_int64) for name in ("columns", "rows", "cache_slots")),
        *((name, ctypes.c_int64) for name in ("outputs", "threads")),
    )


class FusedDecoder:
    """The weights of a model, as `decoder.c` reads them. They stay the model's own.

    Made by `FusedDecoder.of`, which returns the same one again while nothing has changed. In
    between it does not notice what happens to the model's weights, modules and hooks.

    Attributes:
        cache_unit: how the cache must be laid out, for `SlotCache.allocate`.
        spent: `array("q", [0] * len(PHASES))` to have nanoseconds per phase added to it, or None.
        spare: the cache that was the last to be given up; the next one may take its memory.
    """

    @classmethod
    def of(cls, model: PreTrainedModel, max_positions: int) -> "FusedDecoder | None":
        """Return the decoder of a model, for positions below `max_positions`.

        None where the stock forward must do it: another architecture, device or dtype, no kernel,
        modules that were replaced, or hooks that must fire.
        """
        adapter = attached_adapter(model)
        state = _state(model, adapter)
        known = _decoders.get(model)
        if known is not None and known.is_for(state, max_positions):
            return known
        # The latter compiles the kernels.
        if not _is_fit(model, adapter) or not linear_path(model.dtype):
            return None
        made = _decoders[model] = cls(model, adapter, max_positions)
        return made

    def __init__(
        self, model: PreTrainedModel, adapter: GatedAdapter | None, max_positions: int
    ) -> None:
        decoder: Any = model.get_decoder()
        self._embedding = decoder.embed_tokens.weight
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self._head = head
        self._rotation = _rotation(decoder, max_positions, model.dtype)
        attention = decoder.layers[0].self_attn
        self.num_layers, self.dtype = len(decoder.layers), model.dtype
        self.head_width = attention.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_width
        has_units = self.head_width % 2 == 0  # in fp32 two dimensions are taken at once
        if model.dtype == torch.bfloat16:
            has_units = linear_path(model.dtype) == TILES and self.head_width % _UNIT == 0
        self.cache_unit = _UNIT if has_units else 1
        # Packs what is new or changed; the second copy of the weights lives as long as the model.
        PackedLinears(model, *([] if adapter is None else [adapter]))
        self._point(model, adapter)
        self._sample = PackedSample(_linears_of(model, adapter))
        self._state = _state(model, adapter)
        self.spent: array[int] | None = None
        self.spare: deque[SlotCache] = deque(maxlen=1)

    def is_for(self, state: Sequence[int], max_positions: int) -> bool:
        """Whether it serves a model in this state (`_state`), for positions below the given one."""
        fits = max_positions <= len(self._rotation[0]) and state == self._state
        return fits and self._sample.is_equal()

    def forward(
        self, columns: FlatColumns, places: Sequence[int], cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """Run columns of rows that have these places in the cache.

        Keys and values of every column go into its slot.

        Returns:
            Last hidden states (O, D) and logits (O, V) of the columns with outputs.
        """
        # C would read whatever lies behind a table.
        assert 0 <= max(columns.position, default=0) < len(self._rotation[0])
        assert min(columns.token, default=0) >= 0
        assert max(columns.token, default=0) < len(self._embedding)
        assert columns.num_slots <= cache.num_slots
        assert len(places) == len(columns.real_start) - 1
        assert 0 <= min(places) <= max(places) < cache.num_rows
        assert cache.unit == self.cache_unit
        count = len(columns.outputs)
        hidden = self._embedding.new_empty(count, self._embedding.shape[1])
        logits = self._embedding.new_empty(count, self._head.out_features)
        is_shared = self._masks is not None and len(self._masks) == 1
        fields = (
            *(columns.token, columns.position, columns.slot, columns.limit, columns.first),
            [0] * len(columns.offset) if is_shared else columns.offset,
            *(columns.real_start, columns.mask_start, places, columns.outputs),
        )
        arrays = [array("q", field) for field in fields]
        pointers = [
            array("Q", [x.data_ptr() for x in tensors]) for tensors in (cache.keys, cache.values)
        ]
        step = _Step(
            *(x.buffer_info()[0] for x in (*pointers, *arrays)),
            *(hidden.data_ptr(), logits.data_ptr()),
            None if self.spent is None else self.spent.buffer_info()[0],
            *(len(columns.token), len(places), cache.row_slots),
            *(count, torch.get_num_threads()),
        )
        kernels = load_kernels(self.dtype)
        assert kernels is not None
        if kernels.mars_decoder(ctypes.byref(self._structure), ctypes.byref(step)):
            raise MemoryError(f"no memory for a forward of {len(columns.token)} columns")
        return hidden, logits

    def _point(self, model: PreTrainedModel, adapter: GatedAdapter | None) -> None:
        """Fill in the addresses of weights, which `PackedLinears` has packed."""
        decoder: Any = model.get_decoder()
        config: Any = model.config
        loras = {} if adapter is None else dict(adapter.layers())
        names = {module: name for name, module in model.named_modules()}
        self._blocks = (_Block * len(decoder.layers))()
        for block, layer in zip(self._blocks, decoder.layers, strict=True):
            for linear, name in zip(block.linears, _LINEARS, strict=True):
                module = layer.get_submodule(name)
                pair = loras.get(names[module], ())
                parts = zip(("main", "lora_a", "lora_b"), (module, *pair), strict=False)
                for part, source in parts:
                    setattr(linear, part, packed_layer(source))
            block.attention_norm = layer.input_layernorm.weight.data_ptr()
            block.mlp_norm = layer.post_attention_layernorm.weight.data_ptr()
            if hasattr(layer.self_attn, "q_norm"):
                block.query_norm = layer.self_attn.q_norm.weight.data_ptr()
                block.key_norm = layer.self_attn.k_norm.weight.data_ptr()
        masks = None if adapter is None else adapter.mask_embedding.detach().to(self.dtype)
        self._masks = masks  # keeps the memory
        self._structure = _Decoder(
            blocks=self._blocks,
            embedding=self._embedding.data_ptr(),
            mask_embedding=None if masks is None else masks.data_ptr(),
            final_norm=decoder.norm.weight.data_ptr(),
            head=packed_layer(self._head),
            cosine=self._rotation[0].data_ptr(),
            sine=self._rotation[1].data_ptr(),
            num_blocks=self.num_layers,
            width=self._embedding.shape[1],
            heads=config.num_attention_heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            inner=decoder.layers[0].mlp.gate_proj.out_features,
            in_units=self.cache_unit > 1,
            epsilon=decoder.norm.variance_epsilon,
            scale=decoder.layers[0].self_attn.scaling,
        )


def _state(model: PreTrainedModel, adapter: GatedAdapter | None) -> list[int]:
    """Return what a decoder of the model depends on, as far as torch tells of changes."""
    state = [linear_path(model.dtype), id(adapter)]
    for module in chain(model.modules(), adapter.modules() if adapter else ()):
        own = vars(module)
        hooks = *own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()
        state += id(module), module.training, "forward" in own, *map(id, hooks)
        for weight in own["_parameters"].values():
            if weight is not None:
                state += weight.data_ptr(), weight._version
    return state


def _linears_of(model: PreTrainedModel, adapter: GatedAdapter | None) -> list[nn.Linear]:
    decoder: Any = model.get_decoder()
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    found = [layer.get_submodule(name) for layer in decoder.layers for name in _LINEARS]
    return [head, *found, *(x for _, ab in (adapter.layers() if adapter else ()) for x in ab)]


def _is_fit(model: PreTrainedModel, adapter: GatedAdapter | None) -> bool:
    """Whether `decoder.c` computes what the model does."""
    config: Any = model.config
    return (
        type(model).__name__ in _KINDS
        and _is_of_transformers(model)
        and not model.training
        and getattr(config, "hidden_act", None) == "silu"
        and model.dtype in (torch.bfloat16, torch.float32)
        and all(_is_plain(p, model.dtype) for p in model.parameters())
        and all(_is_untouched(module, adapter) for module in model.modules())
        and _has_fit_layers(model)
        and (adapter is None or _has_fit_lora(adapter, model.dtype))
    )


def _has_fit_layers(model: PreTrainedModel) -> bool:
    decoder: Any = model.get_decoder()
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or type(decoder.embed_tokens) is not nn.Embedding:
        return False
    norms, linears = [decoder.norm], [head]
    for layer in decoder.layers:
        found = [layer.get_submodule(name) for name in _LINEARS]
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        if hasattr(layer.self_attn, "q_norm"):
            norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
        if not all(map(_is_of_transformers, (layer, layer.self_attn, layer.mlp))):
            return False
        if layer.mlp.gate_proj.out_features % _UNIT:
            return False
        linears += found
    shapes = {
        tuple(layer.get_submodule(name).weight.shape for name in _LINEARS)
        for layer in decoder.layers
    }
    return (
        len(shapes) == 1
        and len({norm.variance_epsilon for norm in norms}) == 1
        and all(_is_of_transformers(norm) for norm in norms)
        and all(type(linear) is nn.Linear for linear in linears)
    )


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _has_fit_lora(adapter: GatedAdapter, dtype: torch.dtype) -> bool:
    return all(_is_plain(x.weight, dtype) for _, ab in adapter.layers() for x in ab)


def _is_plain(weight: Tensor, dtype: torch.dtype) -> bool:
    is_fit = weight.dtype == dtype and weight.device.type == "cpu"
    return is_fit and weight.is_contiguous() and not weight.is_inference()


def _is_untouched(module: nn.Module, adapter: GatedAdapter | None) -> bool:
    """Whether nobody has replaced the module's forward or wants to be called."""
    hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
    return "forward" not in vars(module) and all(
        adapter is not None and adapter.owns(hook) for hook in hooks
    )


def _rotation(decoder: Any, max_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all positions, (positions, head width)."""
    positions = torch.arange(max_positions)[None]
    like = torch.zeros(1, dtype=dtype)
    with torch.no_grad():
        cosine, sine = decoder.rotary_emb(like, position_ids=positions)
    return cosine[0].contiguous(), sine[0].contiguous()


def gather_rows(values: Tensor, counts: list[int], *, right: bool) -> Tensor:
    """Turn the rows' stretches of (sum of counts, X) into (B, longest, X).

    Filled up with whatever comes first: at the left if `right` (aligned), else at the right.
    """
    longest = max(counts)
    if all(count == longest for count in counts):
        return values.view(len(counts), longest, values.shape[-1])
    index = [0] * (len(counts) * longest)
    start = 0
    for row, count in enumerate(counts):
        first = row * longest + (longest - count if right else 0)
        index[first : first + count] = range(start, start + count)
        start += count
    return values[torch.tensor(index)].view(len(counts), longest, values.shape[-1])
