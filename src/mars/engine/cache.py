"""The KV cache: slot = position, rollback = forgetting.

Every row owns the slots 0, 1, 2, ... of its stretch of the cache, and a token's keys and values
lie in the slot of its position; masks lie behind the last token. A row that takes tokens back
needs to do nothing: the slots beyond its length are invisible until they are written again.
"""

from typing import Any

import torch

from mars.compat import ExternalCache


class SlotCache(ExternalCache):
    """Keys and values of S rows with L slots each: per layer one (S, heads, L, width) tensor.

    The last slot of a row is scratch: padding columns write there, and nobody reads it.

    Attributes:
        keys: one tensor per layer.
        values: one tensor per layer.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        """Allocate nothing yet; `num_slots` counts positions, without the scratch slot."""
        super().__init__()
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

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
            self.keys.append(self._new(key_states))
            self.values.append(self._new(value_states))
        return (
            self._write(self.keys[layer_idx], key_states),
            self._write(self.values[layer_idx], value_states),
        )

    def allocate(self, num_layers: int, heads: int, width: int, dtype: torch.dtype) -> None:
        """Make the tensors of all layers at once, on the CPU, if there are none yet."""
        if not self.keys:
            like = torch.empty(0, heads, 0, width, dtype=dtype)
            self.keys = [self._new(like) for _ in range(num_layers)]
            self.values = [self._new(like) for _ in range(num_layers)]

    def reserve(self, num_slots: int) -> None:
        """Make room for positions below `num_slots`, layer by layer: one at most exists twice."""
        if num_slots <= self.num_slots:
            return
        old, self.num_slots = self.num_slots, num_slots
        for tensors in (self.keys, self.values):
            for layer in range(len(tensors)):
                grown = self._new(tensors[layer])
                grown[:, :, :old] = tensors[layer][:, :, :old]
                tensors[layer] = grown

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row over another row."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: attention gives invisible slots weight 0, and 0 * nan is nan.
        _, heads, _, width = like.shape
        return like.new_zeros(self.num_rows, heads, self.num_slots + 1, width)

    def _write(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        stored[self._row_index, :, self._slots] = new.transpose(1, 2)
        return stored[self._rows, :, : self._num_visible]
