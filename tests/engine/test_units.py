"""Keys and values in units of 32 slots, as matrix tiles want them: the same bits as slot by slot.

Shapes: B rows, H query heads, G of them per key-value head, K slots, U units of them, W width.
"""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mars.decoding.plan import RowPlan
from mars.engine.cache import SlotCache
from mars.engine.kernels.attention import _Call, cpu_attention
from mars.engine.kernels.compiler import load_kernels
from mars.engine.kernels.linear import TILES, linear_path
from mars.engine.runner import Runner
from tests.engine.test_decoder import MOST_POSITIONS, open_rows, small_model, tokens_of
from tests.engine.test_kernels import oracle

BF16 = torch.bfloat16
UNIT = 32
WIDTHS = [32, 64, 96, 128]

needs_tiles = pytest.mark.skipif(linear_path(BF16) != TILES, reason="no AMX, or switched off")


def order_of_keys(units: int, width: int) -> Tensor:
    """Return where the numbers of (K, W) keys lie: their places there, in the order of units."""
    places = torch.arange(units * UNIT * width).view(units, 2, 16, width // 2, 2)
    return places.transpose(2, 3).flatten()


def order_of_values(units: int, width: int) -> Tensor:
    """Do the same for values."""
    places = torch.arange(units * UNIT * width).view(units, 16, 2, width // 16, 16)
    return places.permute(0, 3, 1, 4, 2).flatten()


def in_units(states: Tensor, order: Tensor, filler: float = torch.nan) -> Tensor:
    """Turn (B, H / G, K, W) into (B, H / G, U, 32 * W); the last unit is filled up."""
    rows, heads, slots, width = states.shape
    units = -(-slots // UNIT)
    filled = states.new_full((rows, heads, units * UNIT, width), filler)
    filled[:, :, :slots] = states
    return filled.flatten(2)[..., order].view(rows, heads, units, UNIT * width)


def attend_in_units(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend as `decoder.c` does, to keys and values that come slot by slot."""
    rows, heads, columns, width = query.shape
    units = -(-key.shape[2] // UNIT)
    keys = in_units(key, order_of_keys(units, width))
    values = in_units(value, order_of_values(units, width))
    strides = (keys.stride(0), keys.stride(1), width)
    call = _Call(
        (rows, heads, key.shape[1], columns, key.shape[2], width, width),
        (*query.stride()[:3], *strides, *strides, *mask.stride()[::2]),
        *(True, True, torch.get_num_threads(), width**-0.5, True),
    )
    output = query.new_empty(rows, columns, heads, width)
    kernels = load_kernels(BF16)
    assert kernels is not None
    pointers = [x.data_ptr() for x in (output, query, keys, values, mask)]
    kernels.mars_attention(ctypes.byref(call), *pointers)
    return output


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Tensor, ...]:
    rows, columns = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 5, 6, 17, 30, 70]))
    kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 8))
    slots, width = draw(st.integers(1, 150)), draw(st.sampled_from(WIDTHS))
    torch.manual_seed(draw(st.integers(0, 1000)))
    query = torch.randn(rows, columns, kv_heads * groups, width, dtype=BF16).transpose(1, 2)
    key, value = torch.randn(2, rows, kv_heads, slots, width, dtype=BF16)
    mask = torch.rand(rows, 1, columns, slots) < draw(st.sampled_from([0.03, 0.5, 1.0]))
    mask[..., 0] |= ~mask.any(-1)
    return query, key, value, mask


@needs_tiles
@pytest.mark.parametrize("width", WIDTHS)
def test_a_token_is_put_where_tiles_find_it(width: int) -> None:
    kernels = load_kernels(BF16)
    assert kernels is not None
    for put in (kernels.put_key, kernels.put_value):
        put.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    key, value = torch.randn(2, 1, 1, 3 * UNIT, width, dtype=BF16)
    keys, values = torch.zeros(2, 3 * UNIT * width, dtype=BF16)
    for slot in torch.randperm(3 * UNIT).tolist():
        kernels.put_key(keys.data_ptr(), slot, key[0, 0, slot].data_ptr(), width)
        kernels.put_value(values.data_ptr(), slot, value[0, 0, slot].data_ptr(), width)
    assert torch.equal(keys, in_units(key, order_of_keys(3, width)).flatten())
    assert torch.equal(values, in_units(value, order_of_values(3, width)).flatten())


@needs_tiles
@settings(deadline=None, max_examples=100)
@given(inputs(), st.sampled_from([torch.nan, torch.inf, 1e38]))
def test_attention_is_right_and_gets_the_bits_of_the_other_layout(tensors, garbage):
    query, key, value, mask = tensors
    expected = oracle(*tensors)
    hidden = ~mask[:, 0].any(1)[:, None, :, None]
    key, value = (x.masked_fill(hidden, garbage) for x in (key, value))
    output = attend_in_units(query, key, value, mask)
    scale = oracle(query, tensors[1], tensors[2].abs(), mask)
    error = (output.double() - expected).abs()
    assert (error <= 2**-8 * (expected.abs() + scale) + 2e-6).all()
    assert torch.equal(output, cpu_attention(query, key, value, mask))


@needs_tiles
@settings(deadline=None, max_examples=60)
@given(inputs(), st.data())
def test_a_query_gets_the_same_bits_alone(tensors, data):
    query, key, value, mask = tensors
    row = data.draw(st.integers(0, query.shape[0] - 1))
    column = data.draw(st.integers(0, query.shape[2] - 1))
    seen = mask[row, 0, column].nonzero()[:, 0]
    here, last = slice(row, row + 1), int(seen[-1]) + 1
    alone = attend_in_units(
        query[here, :, column : column + 1],
        key[here, :, :last],
        value[here, :, :last],
        mask[here, :, column : column + 1, :last],
    )
    assert torch.equal(alone[0, 0], attend_in_units(*tensors)[row, column])


def forget(cache: SlotCache, row: int, length: int, width: int) -> None:
    """Put NaN into all slots of a row from `length` on."""
    units = cache.keys[0].shape[2]
    for tensors, order in (
        (cache.keys, order_of_keys(units, width)),
        (cache.values, order_of_values(units, width)),
    ):
        for tensor in tensors:
            tensor[row].flatten(1)[:, order >= length * width] = torch.nan


@needs_tiles
@pytest.mark.parametrize(("width", "heads"), [(32, 2), (64, 6), (96, 12), (128, 14)])
def test_rows_that_grow_move_and_take_back_are_as_fresh_ones(width, heads, monkeypatch):
    """Bit by bit, with NaN in every slot that a row has not written or has forgotten."""
    monkeypatch.setattr("mars.engine.runner._SLACK_SLOTS", 5)
    model = small_model(head_dim=width, num_attention_heads=heads, num_key_value_heads=2)
    sources = [tokens_of(row, MOST_POSITIONS - 12) for row in range(4)]
    lengths, runner = [3, 32, 29, 40], open_rows(model, 4)
    generator = torch.Generator().manual_seed(0)
    slots = []
    for step in range(11):
        tokens = [source[:length] for source, length in zip(sources, lengths, strict=True)]
        plans = [RowPlan((5, 6, 7), (0, 2, 3), 2)] * len(tokens)
        real, masks = runner.forward(0, tokens, plans)
        assert runner.cache.unit == UNIT
        slots.append(runner.cache.num_slots)
        for row, part in enumerate(tokens):
            fresh = open_rows(model, 1, chunk=7)
            alone, alone_masks = fresh.forward(0, [part], plans[:1])
            assert torch.equal(alone[0], real[row])
            assert torch.equal(alone_masks[0], masks[row])
            assert_equal_slots(fresh, runner, row, width)
        if step in (3, 7):  # the last row takes the place of another
            runner.drop_row(0)
            sources, lengths = ([x[-1], *x[1:-1]] for x in (sources, lengths))
        for row, cached in enumerate(runner.cached):
            forget(runner.cache, runner.places[row], cached, width)
        more = torch.randint(1, 9, (len(lengths),), generator=generator).tolist()
        lengths = [a + b for a, b in zip(lengths, more, strict=True)]
    assert len(set(slots)) > 1


def assert_equal_slots(fresh: Runner, runner: Runner, row: int, width: int) -> None:
    count = fresh.cached[0] * width
    for name, order in (("keys", order_of_keys), ("values", order_of_values)):
        for mine, theirs in zip(
            getattr(fresh.cache, name), getattr(runner.cache, name), strict=True
        ):
            mine, theirs = mine[0], theirs[runner.places[row]]
            assert torch.equal(
                mine.flatten(1)[:, order(mine.shape[1], width) < count],
                theirs.flatten(1)[:, order(theirs.shape[1], width) < count],
            )


@needs_tiles
def test_without_tiles_slots_lie_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for build in (small_model, lambda: small_model(head_dim=32)):
        for path in ("1", "avx512"):
            monkeypatch.setenv("MARS_KERNELS", path)
            runner = open_rows(build(), 1)
            runner.forward(0, [tokens_of(0)], [RowPlan()])
            is_wide = runner.cache.keys[0].shape[-1] >= UNIT
            assert runner.cache.unit == (UNIT if is_wide and path == "1" else 1)
