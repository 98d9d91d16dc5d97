import torch
from hypothesis import given
from hypothesis import strategies as st

from mars.engine.cache import SlotCache


def states(rows: int, columns: int, first: float = 1.0) -> torch.Tensor:
    """Numbered (rows, 2 heads, columns, 3) states; every entry of a column has its number."""
    numbers = torch.arange(rows * columns).reshape(rows, 1, columns, 1) + first
    return numbers.expand(rows, 2, columns, 3).float()


def write(
    cache: SlotCache, rows: slice, slots: list[list[int]], num_visible: int, new: torch.Tensor
) -> torch.Tensor:
    cache.prepare(rows, torch.tensor(slots), num_visible)
    keys, values = cache.update(new, -new, 0)
    assert torch.equal(values, -keys)
    return keys[:, 0, :, 0]


def test_columns_go_to_their_slots_and_padding_to_scratch() -> None:
    cache = SlotCache(num_rows=3, num_slots=5)
    seen = write(cache, slice(1, 3), [[-1, 0, 1], [0, 1, 2]], 4, states(2, 3))
    assert seen.tolist() == [[2, 3, 0, 0], [4, 5, 6, 0]]
    assert cache.keys[0].shape == (3, 2, 6, 3)
    assert cache.keys[0][0].eq(0).all()


def test_forgotten_slots_are_overwritten() -> None:
    cache = SlotCache(num_rows=1, num_slots=8)
    write(cache, slice(0, 1), [[0, 1, 2, 3]], 4, states(1, 4))
    seen = write(cache, slice(0, 1), [[1, 2]], 3, states(1, 2, first=10))
    assert seen.tolist() == [[1, 10, 11]]


def test_growing_keeps_everything_but_scratch() -> None:
    cache = SlotCache(num_rows=2, num_slots=3)
    write(cache, slice(0, 2), [[0, 1, -1], [0, 1, 2]], 3, states(2, 3))
    cache.reserve(7)
    assert cache.num_slots == 7
    assert cache.keys[0][:, 0, :, 0].tolist() == [
        [1, 2, 0, 0, 0, 0, 0, 0],
        [4, 5, 6, 0, 0, 0, 0, 0],
    ]
    cache.reserve(4)  # never shrinks
    assert cache.num_slots == 7


def test_growing_holds_one_layer_twice_at_most() -> None:
    cache = SlotCache(num_rows=1, num_slots=2)
    cache.prepare(slice(0, 1), torch.tensor([[0]]), 1)
    for layer in range(4):
        cache.update(states(1, 1), states(1, 1), layer)
    allocated: list[int] = []
    new = cache._new

    def spy(like: torch.Tensor, count: int) -> torch.Tensor:
        sizes = [tensor.shape[2] for tensor in cache.keys + cache.values]
        allocated.append(sizes.count(10))
        return new(like, count)

    cache._new = spy  # type: ignore[method-assign]
    cache.reserve(9)
    assert allocated == [0, 0, 2, 2, 4, 4, 6, 6]  # a layer replaces its old one before the next


def test_layers_allocated_at_once_grow_and_keep_what_they_hold() -> None:
    cache = SlotCache(num_rows=2, num_slots=3)
    cache.allocate(3, heads=2, width=4, dtype=torch.float32)
    assert len(cache.keys) == len(cache.values) == 3
    for number, tensor in enumerate(cache.keys + cache.values):
        tensor.fill_(number)
    cache.allocate(3, heads=2, width=4, dtype=torch.float32)
    cache.reserve(5)
    for number, tensor in enumerate(cache.keys + cache.values):
        assert tensor.shape == (2, 2, 6, 4)
        assert (tensor[:, :, :3] == number).all()
        assert not tensor[:, :, 3:].any()


def test_a_row_moves() -> None:
    cache = SlotCache(num_rows=2, num_slots=3)
    write(cache, slice(0, 2), [[0, 1, 2], [0, 1, 2]], 3, states(2, 3))
    cache.move_row(1, 0, 2)
    assert cache.keys[0][0, 0, :3, 0].tolist() == [4, 5, 3]


def allocated(rows: int, slots: int, *, unit: int = 1, layers: int = 3) -> SlotCache:
    cache = SlotCache(rows, slots)
    cache.allocate(layers, 2, 4, torch.float32, unit=unit)
    return cache


@given(
    st.integers(1, 5), st.integers(0, 70), st.integers(1, 5), st.integers(1, 70), st.integers(1, 40)
)
def test_memory_that_is_taken_over_serves_as_new_one_does(
    rows: int, slots: int, new_rows: int, new_slots: int, unit: int
) -> None:
    used = allocated(rows, slots, unit=unit)
    for tensor in used.keys + used.values:
        tensor.fill_(float("nan"))
    cache, fresh = SlotCache(new_rows, 0), allocated(new_rows, new_slots, unit=unit)
    fits = new_rows * fresh.row_slots <= rows * used.row_slots
    assert cache.adopt(used, new_slots) == fits
    if not fits:
        assert not cache.keys
        assert cache.num_slots == 0
        return
    addresses = {tensor.data_ptr() for tensor in used.keys + used.values}
    assert {tensor.data_ptr() for tensor in cache.keys + cache.values} == addresses
    for mine, theirs in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        assert torch.equal(mine, theirs), "zeros of the same shape"
        assert mine.is_contiguous()
    cache.allocate(3, 2, 4, torch.float32, unit=unit)  # is done already
    for number, tensor in enumerate(cache.keys + cache.values):
        tensor.fill_(number)
    for number, tensor in enumerate(cache.keys + cache.values):
        assert tensor.eq(number).all(), "layers do not overlap"
    cache.reserve(new_slots + 50)
    assert cache.keys[2][:, :, : new_slots // unit].eq(2).all()


def test_a_smaller_user_does_not_make_memory_smaller() -> None:
    large = allocated(4, 63, unit=8)
    small, again = SlotCache(1, 0), SlotCache(4, 0)
    assert small.adopt(large, 8)
    assert again.adopt(small, 63)
    assert not SlotCache(4, 0).adopt(again, 64)
    assert not SlotCache(1, 0).adopt(SlotCache(1, 0), 1), "there is no memory"
