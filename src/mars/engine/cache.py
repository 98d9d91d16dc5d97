"""The KV cache: slot = position, rollback = forgetting.

Every row owns the slots 0, 1, 2, ... of its stretch of the cache, and a token's keys and values
lie in the slot of its position; masks lie behind the last token. A row that takes tokens back
needs to do nothing: the slots beyond its length are invisible until they are written again.

Slots may go in units, inside of which the numbers lie as a kernel wants them; here a unit is moved
as a whole.
"""

import math
from typing import Any

import torch

from mars.compat import ExternalCache
from mars.engine.kernels.linear import want_large_pages

_STRETCH_BYTES = 1 << 24


class SlotCache(ExternalCache):
    """Keys and values of S rows with L slots each: per layer one (S, heads, L, width) tensor.

    The last slot of a row is scratch: padding columns write there, and nobody reads it. In units of
    U slots it is (S, heads, L / U, U * width), and L is a multiple.

    Attributes:
        unit: slots of a unit.
        keys: one tensor per layer.
        values: one tensor per layer.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        """Allocate nothing yet; `num_slots` counts positions, without the scratch slot."""
        super().__init__()
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.unit = 1
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        # Of some layers each: (layers, S, heads, L, width), and the memory, (layers, numbers).
        self._stretches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepare(self, rows: slice, slots: torch.Tensor, num_visible: int) -> None:
        """Say where the next forward writes and how far it reads.

        Args:
            rows: the rows of the cache that take part.
            slots: int64 (B, T), the slot of each column; -1 is the scratch slot.
            num_visible: slots that the rows may attend to, from the first.
        """
        assert num_visible <= self.num_slots, "call `reserve` first"
        self._rows = rows
        self._row_index = torch.arange(rows.start, rows.stop, device=slots.device)[:, None]
        self._slots = slots
        self._num_visible = num_visible

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, heads, T, width) keys and values; return all the visible ones."""
        if layer_idx == len(self.keys):
            self._add_new(key_states, 1)
        return (
            self._write(self.keys[layer_idx], key_states),
            self._write(self.values[layer_idx], value_states),
        )

    @property
    def row_slots(self) -> int:
        """Slots of a row, the scratch slot and what fills up the last unit among them."""
        return self._num_units(self.num_slots + 1) * self.unit

    def allocate(
        self, num_layers: int, heads: int, width: int, dtype: torch.dtype, *, unit: int = 1
    ) -> None:
        """Make the tensors of all layers at once, on the CPU, if there are none yet.

        Those of some layers lie together, so that large pages fit them.
        """
        if self.keys:
            return
        self.unit = unit
        like = torch.empty(0, heads, 0, unit * width, dtype=dtype)
        layer_bytes = self.num_rows * heads * self.row_slots * width * like.itemsize
        together = max(1, -(-_STRETCH_BYTES // layer_bytes))
        for start in range(0, num_layers, together):
            count = min(together, num_layers - start)
            self._add_new(like, count)

    def adopt(self, used: "SlotCache", num_slots: int) -> bool:
        """Take the memory of a cache that nobody needs, laid out anew for this one's rows.

        Memory that was touched before costs much less than new one. Only before `allocate`, for the
        same model; the other one must not be used again.

        Returns:
            Whether it is enough for positions below `num_slots`; if not, nothing has changed.
        """
        assert not self.keys
        if not used.keys:
            return False
        _, heads, _, size = used.keys[0].shape
        shape = self.num_rows, heads, -(-(num_slots + 1) // used.unit), size
        if math.prod(shape) > used._memory[0][0].shape[1]:
            return False
        self.unit, self.num_slots = used.unit, num_slots
        for pair in used._memory:
            self._memory.append(pair)
            self._add(*(x[:, : math.prod(shape)].unflatten(1, shape).zero_() for x in pair))
        return True

    def reserve(self, num_slots: int) -> None:
        """Make room for positions below `num_slots`, some layers at a time: few exist twice."""
        if num_slots <= self.num_slots:
            return
        old, self.num_slots = self._num_units(self.num_slots), num_slots
        before, self.keys, self.values, self._stretches = self._stretches, [], [], []
        self._memory.clear()
        while before:
            self._add_new(before[0][0][0], len(before[0][0]))
            for new, stretch in zip(self._stretches[-1], before.pop(0), strict=True):
                new[..., :old, :] = stretch[..., :old, :]

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row over another row."""
        count = self._num_units(length)
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :count] = tensor[source, :, :count]

    def _num_units(self, num_slots: int) -> int:
        return -(-num_slots // self.unit)

    def _new(self, like: torch.Tensor, count: int) -> torch.Tensor:
        _, heads, _, size = like.shape
        units = self._num_units(self.num_slots + 1)
        made = like.new_empty(count, self.num_rows, heads, units, size)
        want_large_pages(made)
        # Zeros, not garbage: attention gives invisible slots weight 0, and 0 * nan is nan.
        return made.zero_()

    def _add_new(self, like: torch.Tensor, count: int) -> None:
        keys, values = self._new(like, count), self._new(like, count)
        self._memory.append((keys.flatten(1), values.flatten(1)))
        self._add(keys, values)

    def _add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append layers: (layers, S, heads, L, width) each."""
        self._stretches.append((keys, values))
        self.keys += keys.unbind()
        self.values += values.unbind()

    def _write(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        stored[self._row_index, :, self._slots] = new.transpose(1, 2)
        return stored[self._rows, :, : self._num_visible]
