"""Linear layers on the CPU: a row gets the same bits whatever stands beside it.

`PackedLinears` runs the `nn.Linear` layers of a stock model through `linear.c` (bf16) or `floats.c`
(fp32) inside a `with` block and leaves no trace in the model. The weights exist twice then: as the
model's parameters and packed, in the order in which the kernel reads them. Layers in bf16 that were
quantised once, in blocks of 32 inputs as GGUF's Q4_0, Q4_1 and Q8_0, are packed in 4 or 8 bits
(`packed.h`), layers in fp32 with weights that are numbers of bf16 in 16 bits, and nothing is lost:
the kernel computes with the very same weights. Parameters that are a mapped file, as those of
a model loaded in the precision of its file, need no memory once they are packed: their pages are
given back to the system, which reads them again when somebody wants them.
"""

import ctypes
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mars.engine.kernels.compiler import load_kernels

TILES = 2  # of `linear_path`: AMX
_DENSE, _NARROW, _SHORT, *_LEVELS = range(5)  # forms of packed.h
_FLOATS, _UPPER_HALVES = range(2)  # forms of floats.c
_LARGEST = 0  # the form that takes the most memory, of both
_DTYPES = (torch.bfloat16, torch.float32)
_HALF = 16  # most outputs of a narrow layer, most inputs of a short one
_LARGE_PAGE = 1 << 21
_VECTORS_ONLY = "avx512"  # value of MARS_KERNELS: leave the tiles (AMX) alone

_packed: WeakKeyDictionary[nn.Linear, "_Packed"] = WeakKeyDictionary()
_first_packing = threading.Lock()
_packing = threading.Lock()


class _Layer(ctypes.Structure):
    """`struct layer` of linear.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("path", ctypes.c_int64),
        ("form", ctypes.c_int64),
    )


_Strides = ctypes.c_int64 * 4


class PackedLinears:
    """Run the linear layers of models through the kernel inside a `with` block, without gradient.

    Layers of exactly the type `nn.Linear`, on the CPU and in bf16 or fp32, whose forward nobody
    has replaced, are packed here, once each; the others are left alone, and those for which there
    is no kernel. Forward hooks fire as ever. A layer whose weight has been changed in place or
    replaced is packed again when it is called. A change through `.data`, of which torch does not
    tell, is looked for when the next `PackedLinears` of the model is made, in eight weights of
    every layer: if one differs, all layers are packed again.

    One thread at a time may be inside the block of a model. Calls of other threads, and calls with
    gradient, work as always.
    """

    def __init__(self, model: nn.Module, *adapters: nn.Module) -> None:
        """Pack what is not packed yet: a copy of all the weights.

        Layers of adapters are packed as they are: they add to the sums of other layers.
        """
        self._forwards: list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = []
        layers, added = _layers(model), [x for adapter in adapters for x in _layers(adapter)]
        with _first_packing:
            stale = _stale([*layers, *added])
            _pack(stale, set(added))
            _let_go(stale, model)
            self._forwards = [(vars(m), _forward_of(m, _packed[m])) for m in [*layers, *added]]

    def __enter__(self) -> Self:
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)


def add_lora(a: nn.Linear, b: nn.Linear, x: Tensor, output: Tensor, start: int) -> bool:
    """Add B A x to the columns of a layer's output from `start` on, in place and in one call.

    Args:
        a: from K to r.
        b: from r to N.
        x: (B, T, K), the layer's input.
        output: (B, T, N).
        start: first column.

    Returns:
        False, having done nothing, outside of a `PackedLinears` block that has packed both, where
        they or the tensors are no longer what the kernel takes, and in another dtype than bf16.
    """
    packed_a = getattr(a.__dict__.get("forward"), "packed", None)
    packed_b = getattr(b.__dict__.get("forward"), "packed", None)
    if packed_a is None or packed_b is None or not (x.is_contiguous() and output.is_contiguous()):
        return False
    if not (packed_a.is_untouched(a) and packed_b.is_untouched(b)) or x.dtype != torch.bfloat16:
        return False
    (batches, columns, inputs), outputs = x.shape, packed_b.outputs
    _kernels(x.dtype).mars_lora(
        *(packed_a.structure, packed_b.structure),
        *(x.data_ptr() + 2 * start * inputs, output.data_ptr() + 2 * start * outputs),
        _Strides(columns * inputs, inputs, columns * outputs, outputs),
        *(batches, columns - start),
    )
    return True


def packed_layer(layer: nn.Linear) -> int:
    """Return the address of the `struct layer` of a layer that a `PackedLinears` has packed.

    It stays as long as the layer; its weights are packed again in place.
    """
    return _packed[layer].structure


def packed_bytes(model: nn.Module) -> int:
    """Pack the layers of a model and return the bytes that they take; 0 without a kernel."""
    layers = _layers(model)
    if not all(layer in _packed for layer in layers):
        PackedLinears(model)
    return sum(_packed[layer].memory.nbytes for layer in layers if layer in _packed)


def want_large_pages(memory: Tensor) -> None:
    """Ask for large pages for a tensor that nobody has touched yet, where that is possible."""
    _ask_for_large_pages(memory, memory.dtype)


def _ask_for_large_pages(memory: Tensor, dtype: torch.dtype) -> None:
    kernels = load_kernels(dtype) if memory.device.type == "cpu" else None
    if kernels is not None:
        kernels.mars_advise(memory.data_ptr(), memory.nbytes)


def linear_path(dtype: torch.dtype) -> int:
    """Return which instructions the kernel for a dtype uses; 0: there is none.

    bfloat16: 2 AMX, 1 AVX-512 BF16; MARS_KERNELS=avx512 keeps it from using AMX. float32: 1 vectors
    with fused multiply-add.
    """
    kernels = load_kernels(dtype)
    if kernels is None:
        return 0
    return kernels.mars_linear_path(os.environ.get("MARS_KERNELS") != _VECTORS_ONLY)


class _Packed:
    """The packed weights of one layer, and what tells whether they are still those of the layer."""

    def __init__(self, layer: nn.Linear, memory: Tensor, *, may_shrink: bool) -> None:
        """Pack a layer into the first bytes of `memory`.

        `memory` has as many bytes as `_most_bytes` says, at least. `may_shrink`: levels are looked
        for.
        """
        self.outputs, self.inputs = layer.weight.shape
        self.dtype = layer.weight.dtype
        path = linear_path(self.dtype)
        self.layer = _Layer(None, None, self.outputs, self.inputs, path, _LARGEST)
        self.structure = ctypes.addressof(self.layer)
        self.address = self.version = self.bias_address = 0
        self._pack(layer, memory, _forms(layer, may_shrink=may_shrink))

    def update(self, layer: nn.Linear) -> bool:
        """Pack the layer's weight again, or do nothing and return False where it does not fit."""
        if not _is_fit(layer) or layer.weight.shape != (self.outputs, self.inputs):
            return False
        if layer.weight.dtype != self.dtype:
            return False
        if not self._pack(layer, self.memory, (self.layer.form,)):  # it needs more memory now
            memory = torch.empty(_most_bytes(layer), dtype=torch.uint8)
            self._pack(layer, memory, _forms(layer, may_shrink=False)[-1:])
        return True

    def _pack(self, layer: nn.Linear, memory: Tensor, forms: Sequence[int]) -> bool:
        """Pack in the first of some forms that can hold the weights; False: in none."""
        weight, bias = layer.weight, layer.bias
        arguments = memory.data_ptr(), weight.data_ptr(), *weight.shape, weight.stride(0)
        threads, kernels = torch.get_num_threads(), _kernels(self.dtype)
        with _packing:
            for form in forms:
                if not kernels.mars_pack(*arguments, form, threads):
                    continue
                self.memory = memory[: kernels.mars_packed_bytes(*weight.shape, form)]
                self.layer.weight, self.layer.form = memory.data_ptr(), form
                self.address, self.version = weight.data_ptr(), weight._version
                self.bias_address = bias is not None and bias.data_ptr()
                self.layer.bias = self.bias_address or None
                # Aliases: as long as they live, no other tensor can have their addresses.
                self.sources = weight.detach(), None if bias is None else bias.detach()
                return True
        return False

    def is_of(self, layer: nn.Linear) -> bool:
        """Whether these are the weights of the layer, as far as torch tells, for today's path."""
        weight = layer.weight
        fits = weight.shape == (self.outputs, self.inputs) and weight.dtype == self.dtype
        return fits and self.layer.path == linear_path(self.dtype) and self.is_untouched(layer)

    def is_untouched(self, layer: nn.Linear) -> bool:
        """Look at what torch tells of changes."""
        weight = layer.weight
        return self.address == weight.data_ptr() and self.version == weight._version


class PackedSample:
    """Some weights of packed layers, to see whether they have been changed behind torch's back."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Look at layers that a `PackedLinears` has packed."""
        packed = [_packed[layer] for layer in layers]
        self._arrays = {}
        for dtype in {one.dtype for one in packed}:
            found = [one for one in packed if one.dtype == dtype]
            self._arrays[dtype] = (
                array("Q", [one.structure for one in found]),
                array("Q", [one.address for one in found]),
                array("q", [one.sources[0].stride(0) for one in found]),
            )

    def is_equal(self) -> bool:
        """Compare; the layers' weights must still be where they were."""
        for dtype, arrays in self._arrays.items():
            pointers = (values.buffer_info()[0] for values in arrays)
            if not _kernels(dtype).mars_are_packed(*pointers, len(arrays[0])):
                return False
        return True


def _layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers of a model that can be packed."""
    modules = model.modules()
    return [m for m in modules if type(m) is nn.Linear and _is_stock(m) and _is_fit(m)]


def _kernels(dtype: torch.dtype) -> ctypes.CDLL:
    kernels = load_kernels(dtype)
    assert kernels is not None
    return kernels


def _is_stock(layer: nn.Linear) -> bool:
    forward = vars(layer).get("forward")  # ours, while another thread is inside the block
    return forward is None or getattr(forward, "__module__", None) == __name__


def _is_fit(layer: nn.Linear) -> bool:
    bias = layer.bias
    weight = layer.weight
    return (
        _is_plain(weight)
        and weight.numel() > 0
        and (bias is None or (_is_plain(bias, weight.dtype) and bias.is_contiguous()))
        and linear_path(weight.dtype) > 0  # last: it compiles the kernels
    )


def _is_plain(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype in (dtypes or _DTYPES)
        and tensor.device.type == "cpu"
        and tensor.stride(-1) == 1
        and not tensor.is_inference()  # such tensors do not tell when they are changed
    )


def _stale(layers: list[nn.Linear]) -> list[nn.Linear]:
    """Return the layers that must be packed, anew or again."""
    known = [layer for layer in layers if layer in _packed]
    kept = [layer for layer in known if _packed[layer].is_of(layer)]
    if not PackedSample(kept).is_equal():
        return layers
    return [layer for layer in layers if layer not in set(kept)]


def _pack(layers: list[nn.Linear], added: set[nn.Linear]) -> None:
    """Pack layers into one stretch of memory: with large pages it is read a quarter faster."""
    if not layers:
        return
    # What levels save is never touched: it is no memory.
    memory = torch.empty(sum(map(_most_bytes, layers)) + 2 * _LARGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _LARGE_PAGE
    memory = memory[start:]
    _ask_for_large_pages(memory, layers[0].weight.dtype)
    for layer in layers:
        packed = _Packed(layer, memory, may_shrink=layer not in added)
        _packed[layer] = packed
        memory = memory[packed.memory.nbytes :]


def _let_go(layers: list[nn.Linear], model: nn.Module) -> None:
    """Give the pages of packed weights in mapped files back.

    Weights that other modules have, too, such as embeddings, stay: they are read row by row, and a
    page from the disk takes as long as a layer.
    """
    files = _mapped_files() if layers else []
    others = [m for m in model.modules() if type(m) is not nn.Linear]
    used = {p.data_ptr() for m in others for p in m._parameters.values() if p is not None}
    for layer in layers:
        start = layer.weight.data_ptr()
        if start not in used and any(first <= start < end for first, end in files):
            _kernels(layer.weight.dtype).mars_let_go(start, layer.weight.nbytes)


def _forms(layer: nn.Linear, *, may_shrink: bool) -> Sequence[int]:
    """Return the forms to be tried; the last one holds any weights."""
    if layer.weight.dtype == torch.float32:
        return (_UPPER_HALVES, _FLOATS)
    if layer.out_features <= _HALF:
        plain = _NARROW
    else:
        plain = _SHORT if layer.in_features <= _HALF else _DENSE
    return (*_LEVELS, plain) if may_shrink else (plain,)


def _most_bytes(layer: nn.Linear) -> int:
    """Return the bytes of a layer's weights in the largest form."""
    kernels = _kernels(layer.weight.dtype)
    return kernels.mars_packed_bytes(layer.out_features, layer.in_features, _LARGEST)


def _mapped_files() -> list[tuple[int, int]]:
    """Return where files lie in this process's memory, from and to; where Linux tells."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    ranges = [line.split()[0].split("-") for line in lines if len(line.split()) > 5 and "/" in line]
    return [(int(first, 16), int(end, 16)) for first, end in ranges]


def _forward_of(module: nn.Linear, packed: _Packed) -> Callable[[Tensor], Tensor]:
    """Return what stands in for `module.forward`; every microsecond counts: 200 calls a step."""
    run = _kernels(packed.dtype).mars_linear
    parameters: dict[str, Any] = module._parameters
    inputs, shape = packed.inputs, (packed.outputs,)
    address = packed.structure  # a part of `packed`, which the closure keeps
    is_grad_enabled, num_threads = torch.is_grad_enabled, torch.get_num_threads
    dtype, plain = packed.dtype, nn.Linear.forward

    def forward(x: Tensor) -> Tensor:
        if is_grad_enabled() or x.dtype is not dtype or not x.is_cpu or x.shape[-1] != inputs:
            return plain(module, x)
        weight, bias = parameters["weight"], parameters["bias"]
        if (
            weight.data_ptr() != packed.address
            or weight._version != packed.version
            or (bias is not None and bias.data_ptr()) != packed.bias_address
        ) and not packed.update(module):
            return plain(module, x)
        y = x.new_empty((*x.shape[:-1], *shape))
        stride = inputs
        if not x.is_contiguous():
            x = x.reshape(-1, inputs)
            x = x if x.stride(1) == 1 else x.contiguous()
            stride = x.stride(0)
        run(address, x.data_ptr(), stride, y.data_ptr(), x.numel() // inputs, num_threads())
        return y

    forward.packed = packed  # type: ignore[attr-defined]
    return forward
