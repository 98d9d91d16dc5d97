"""The kernels in C: right, the same bits in any company, and dispensable."""

import multiprocessing
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.engine.attention import grouped_attention
from mars.engine.kernels import compiler
from mars.engine.kernels.attention import cpu_attention
from mars.engine.kernels.linear import PackedLinears, linear_path

needs_kernel = pytest.mark.skipif(
    compiler.load_kernels(torch.float32) is None, reason="no C compiler, or switched off"
)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@st.composite
def inputs(draw: Callable) -> tuple[torch.Tensor, ...]:
    """Draw queries, keys, values and a mask; keys and values are stretches of a larger cache."""
    rows, columns = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 30]))
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    slots, slack = draw(st.integers(1, 150)), draw(st.integers(0, 40))
    width = draw(st.sampled_from([4, 7, 32, 64, 80, 128]))
    value_width = draw(st.sampled_from([width, 6, 33]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    query = torch.randn(rows, columns, kv_heads * groups, width).transpose(1, 2)
    key = torch.randn(rows + 1, kv_heads, slots + slack, width)[1:, :, :slots]
    value = torch.randn(rows + 1, kv_heads, slots + slack, value_width)[:-1, :, :slots]
    mask = torch.rand(rows, 1, columns, slots) < draw(st.sampled_from([0.03, 0.5, 1.0]))
    mask[..., 0] |= ~mask.any(-1)
    return query.to(dtype), key.to(dtype), value.to(dtype), mask


def oracle(query, key, value, mask):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def attend(*tensors: torch.Tensor) -> torch.Tensor:
    output = cpu_attention(*tensors)
    assert output is not None
    return output


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_kernel
@settings(deadline=None, max_examples=60)
@given(inputs())
def test_equals_float64_within_rounding(tensors):
    expected = oracle(*tensors)
    output = attend(*tensors)
    assert output.is_contiguous()
    assert output.dtype == tensors[0].dtype
    error = (output.double() - expected).abs()
    # Of the result; and, with matrix tiles, of the weights of the values that it is a mean of.
    query, key, value, mask = tensors
    scale = oracle(query, key, value.abs(), mask) if output.dtype == torch.bfloat16 else 0
    assert (error <= ROUNDING[output.dtype] * (expected.abs() + scale) + 2e-6).all()


@needs_kernel
@settings(deadline=None, max_examples=60)
@given(inputs(), st.data())
def test_a_query_gets_the_same_bits_in_any_company(tensors, data):
    query, key, value, mask = tensors
    together = attend(*tensors)
    row = data.draw(st.integers(0, query.shape[0] - 1))
    column = data.draw(st.integers(0, query.shape[2] - 1))
    alone = slice(row, row + 1), slice(None), slice(column, column + 1)
    seen = mask[row, 0, column].nonzero()[:, 0]
    last = int(seen[-1]) + 1
    companies = {
        "alone": (query[alone], key[alone[:2]], value[alone[:2]], mask[alone]),
        "smaller cache": (
            query[alone],
            key[alone[0], :, :last],
            value[alone[0], :, :last],
            mask[alone][..., :last],
        ),
        "only what it sees": (
            query[alone],
            key[alone[0]][:, :, seen],
            value[alone[0]][:, :, seen],
            mask[alone][..., seen],
        ),
    }
    for name, company in companies.items():
        assert torch.equal(attend(*company)[0, 0], together[row, column]), name


@needs_kernel
@pytest.mark.parametrize("columns", [1, 8, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(threads, columns, dtype):
    torch.manual_seed(0)
    query = torch.randn(3, 9, columns, 64, dtype=dtype)
    key, value = torch.randn(2, 3, 3, 300, 64, dtype=dtype)
    mask = torch.rand(3, 1, columns, 300) < 0.9
    outputs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outputs += [attend(query, key, value, mask)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@needs_kernel
def test_there_is_one_openmp_library():
    """A second one would have threads of its own, which would fight with torch's for the cores."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    libraries = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(libraries) <= 1


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_nobody_sees_does_no_harm(dtype):
    torch.manual_seed(0)
    query = torch.randn(2, 4, 3, 16, dtype=dtype)
    key, value = torch.randn(2, 2, 2, 40, 16, dtype=dtype)
    mask = torch.ones(2, 1, 3, 40, dtype=torch.bool)
    mask[:, :, :, 7:20] = False
    mask[1, :, 2] = False  # a padding column
    expected = attend(query, key, value, mask)
    assert (expected[1, 2] == 0).all()
    for garbage in (torch.nan, torch.inf):
        key[:, :, 7:20] = value[:, :, 7:20] = garbage
        assert torch.equal(attend(query, key, value, mask), expected)


@needs_kernel
def test_large_scores_and_nan():
    query = torch.full((1, 1, 1, 16), 30.0)
    key = torch.stack([torch.full((16,), sign * 30.0) for sign in (1, -1, 1)])[None, None]
    value = torch.tensor([1.0, 2.0, 4.0])[None, None, :, None]
    mask = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    assert attend(query, key, value, mask).item() == 2.5
    key[0, 0, 1] = torch.nan
    assert attend(query, key, value, mask).isnan().all()


@needs_kernel
@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-100, 0), min_size=1, max_size=40))
def test_exponential(scores):
    """One visible slot has score 0; the weight of the other is exp(score) / (1 + exp(score))."""
    for score in scores:
        key = torch.tensor([[0.0], [score]])[None, None]
        value = torch.tensor([[0.0], [1.0]])[None, None]
        mask = torch.ones(1, 1, 1, 2, dtype=torch.bool)
        output = attend(torch.ones(1, 1, 1, 1), key, value, mask)
        expected = torch.sigmoid(key[0, 0, 1].double())
        torch.testing.assert_close(output[0, 0, 0].double(), expected, rtol=4e-7, atol=1e-37)


def test_where_it_cannot_be_used():
    tensor, mask = torch.randn(1, 1, 1, 4), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    assert cpu_attention(tensor.half(), tensor.half(), tensor.half(), mask) is None
    assert cpu_attention(tensor, tensor, tensor, mask.float()) is None
    tensor.requires_grad_()
    assert cpu_attention(tensor, tensor, tensor, mask) is None
    assert grouped_attention(torch.nn.Module(), tensor, tensor, tensor, mask)[0].requires_grad


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Forget the loaded kernel, and use an empty cache folder."""
    monkeypatch.setenv("MARS_HOME", str(tmp_path / "cache"))
    compiler.load_kernels.cache_clear()
    yield tmp_path
    compiler.load_kernels.cache_clear()


@needs_kernel
def test_it_is_compiled_once(fresh, monkeypatch):
    assert compiler.load_kernels(torch.float32) is not None
    compiler.load_kernels.cache_clear()
    commands = []
    run = compiler._run
    monkeypatch.setattr(compiler, "_run", lambda *words: commands.append(words) or run(*words))
    assert compiler.load_kernels(torch.float32) is not None
    assert [words[1:] for words in commands] == [("--version",)]
    assert len(list((fresh / "cache" / "kernels").iterdir())) == 1  # and no scratch


def use_kernel(_: int) -> bool:
    return compiler.load_kernels(torch.float32) is not None


@needs_kernel
def test_several_processes_compile_at_once(fresh):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert all(pool.map(use_kernel, range(3), chunksize=1))
    assert len(list((fresh / "cache" / "kernels").iterdir())) == 1


def attention_with_warnings() -> list[str]:
    tensor, mask = torch.randn(1, 1, 1, 4), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            output, _ = grouped_attention(torch.nn.Module(), tensor, tensor, tensor, mask)
            torch.testing.assert_close(output, tensor)
    return [str(warning.message) for warning in caught]


def test_without_a_compiler_torch_does_it_and_we_say_so_once(fresh, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh))
    (message,) = attention_with_warnings()
    assert "no C compiler" in message
    assert "MARS_KERNELS=0" in message


@pytest.mark.parametrize("script", ["echo 'it is broken' >&2; exit 1", "exit 0"])
def test_a_broken_compiler(fresh, monkeypatch, script):
    compiler = fresh / "gcc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fresh}{os.pathsep}{os.environ['PATH']}")
    (message,) = attention_with_warnings()
    assert "could not be compiled" in message
    assert "echo" not in script or "it is broken" in message


def test_it_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv("MARS_KERNELS", "0")
    assert attention_with_warnings() == []
    assert not (fresh / "cache").exists()


@needs_kernel
@pytest.mark.parametrize("processor", ["", "-march=x86-64-v3"])
def test_other_processors(fresh, monkeypatch, processor):
    """Without the vector instructions of this one, and without warnings."""
    if processor and platform.machine() != "x86_64":
        pytest.skip("another kind of processor")
    flags = [flag for flag in compiler._FLAGS if not flag.startswith("-march")]
    flags += ["-Wall", "-Wextra", "-Wno-psabi", "-Werror", *processor.split()]
    monkeypatch.setattr(compiler, "_FLAGS", flags)
    test_equals_float64_within_rounding()
    test_a_query_gets_the_same_bits_in_any_company()
    assert linear_path(torch.float32) == bool(processor)  # without fused multiply-add torch does it
    for rounded in (False, True) if processor else ():
        layer, x = torch.nn.Linear(101, 45), torch.randn(40, 101)
        layer = layer.bfloat16().float() if rounded else layer
        with torch.no_grad(), PackedLinears(layer):
            together, alone = layer(x), torch.cat([layer(row[None]) for row in x])
        assert torch.equal(together, alone)
        torch.testing.assert_close(together, layer(x))
