"""Linear layers in C: right, the same bits in any company, and without a trace in the model."""

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars.decoding.plan import RowPlan
from mars.engine.kernels import compiler, linear
from mars.engine.kernels.linear import PackedLinears, add_lora, linear_path
from mars.engine.runner import Runner
from mars.gated import GatedAdapter, GatedConfig
from tests.conftest import make_model

BF16 = torch.bfloat16
SIZES = [1, 2, 15, 31, 32, 33, 64, 96, 100, 130, 512, 576]
ROWS = [*range(1, 71), 128, 300, 512]

DTYPE = BF16  # of layers; the fixture `dtype` sets it
IS_ROUNDED = False  # whether weights in float32 are numbers of bfloat16
KINDS = ["bfloat16", "float32", "float32, rounded"]

needs_kernel = pytest.mark.usefixtures("dtype")
needs_bf16 = pytest.mark.skipif(
    linear_path(BF16) == 0, reason="no C compiler, no AVX-512 BF16, or switched off"
)


@pytest.fixture(params=KINDS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use layers in bfloat16, then in float32, which are packed in another form if rounded."""
    dtype = BF16 if request.param == "bfloat16" else torch.float32
    if not linear_path(dtype):
        pytest.skip("no C compiler, no such instructions, or switched off")
    monkeypatch.setitem(globals(), "DTYPE", dtype)
    monkeypatch.setitem(globals(), "IS_ROUNDED", "rounded" in request.param)


@pytest.fixture(params=["tiles", "vectors"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, dtype: None) -> None:
    """Use AMX, then AVX-512 BF16; in float32 there is one way."""
    if DTYPE is torch.float32:
        if request.param == "vectors":
            pytest.skip("the same")
        return
    monkeypatch.setenv("MARS_KERNELS", "avx512" if request.param == "vectors" else "1")
    if linear_path(BF16) != ["", "vectors", "tiles"].index(request.param):
        pytest.skip("not on this processor")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_layer(outputs: int, inputs: int, *, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight)
    return layer.to(BF16).to(DTYPE) if IS_ROUNDED else layer.to(DTYPE)


@torch.no_grad()
def apply(layer: nn.Linear, x: Tensor) -> Tensor:
    with PackedLinears(layer):
        assert "forward" in vars(layer), "the kernel is not used"
        y = layer(x)
    assert "forward" not in vars(layer)
    return y


def assert_right(layer: nn.Linear, x: Tensor, y: Tensor) -> None:
    assert y.shape == (*x.shape[:-1], layer.out_features)
    assert y.dtype == DTYPE
    weight, x = layer.weight.double(), x.double()
    expected, scale = x @ weight.T, x.abs() @ weight.abs().T
    if layer.bias is not None:
        expected = expected + layer.bias.double()
    # Half a unit in the last place of the result, and the errors of fp32 sums.
    error = (y.double() - expected).abs()
    rounding, of_sums = (2**-8, 1e-5) if DTYPE == BF16 else (2**-23, 1e-6)
    assert (error <= rounding * expected.abs() + of_sums * scale + 1e-30).all()


@needs_kernel
@settings(deadline=None, max_examples=100)
@given(
    rows=st.sampled_from([0, 1, 2, 7, 12, 13, 16, 17, 31, 32, 33, 40, 49, 65, 200]),
    outputs=st.sampled_from(SIZES),
    inputs=st.sampled_from(SIZES),
    bias=st.booleans(),
    layout=st.sampled_from(["dense", "3-d", "every other row", "3-d slice", "wide", "transposed"]),
    seed=st.integers(0, 99),
)
@pytest.mark.usefixtures("path")
def test_equals_float64_within_rounding(
    rows: int, outputs: int, inputs: int, bias: bool, layout: str, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = make_layer(outputs, inputs, bias=bias)
    x = {
        "dense": lambda: torch.randn(rows, inputs),
        "3-d": lambda: torch.randn(2, rows, inputs),
        "every other row": lambda: torch.randn(2 * rows, inputs)[::2],
        "3-d slice": lambda: torch.randn(3, rows + 2, inputs)[:, 1:-1],
        "wide": lambda: torch.randn(rows, inputs + 9)[:, 5:-4],
        "transposed": lambda: torch.randn(inputs, rows).T,
    }[layout]()
    # The surroundings of a strided input are never looked at.
    x = x.to(DTYPE) if x.is_contiguous() else surrounded_by_nan(x)
    assert_right(layer, x.detach(), apply(layer, x).detach())


def surrounded_by_nan(x: Tensor) -> Tensor:
    """Return the same numbers with the same strides, all other memory being NaN."""
    storage = torch.full((x.untyped_storage().nbytes() // 4,), torch.nan, dtype=DTYPE)
    return torch.as_strided(storage, x.shape, x.stride(), x.storage_offset()).copy_(x)


@needs_kernel
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 576), (70, 100), (33, 1536), (96, 2048)])
def test_a_row_gets_the_same_bits_in_any_company(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    layer, x = make_layer(outputs, inputs, bias=True), torch.randn(512, inputs).to(DTYPE)
    alone = torch.cat([apply(layer, row[None]) for row in x])
    for rows in ROWS:
        start = rows % 7 if rows < 500 else 0
        assert torch.equal(apply(layer, x[start : start + rows]), alone[start : start + rows]), rows
    order = torch.randperm(512)
    assert torch.equal(apply(layer, x[order]), alone[order])
    x[1::2] = torch.nan
    assert torch.equal(apply(layer, x)[::2], alone[::2])


@needs_kernel
@pytest.mark.usefixtures("path", "threads")
@pytest.mark.parametrize("rows", [1, 8, 40, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 576), (33, 4000), (1500, 100)])
def test_threads_and_number_of_outputs_change_nothing(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    layer, x = make_layer(outputs, inputs), torch.randn(rows, inputs).to(DTYPE)
    torch.set_num_threads(1)
    expected = apply(layer, x)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert torch.equal(apply(layer, x), expected)
    fewer = nn.Linear(inputs, 5, bias=False).to(DTYPE)
    fewer.weight.data = layer.weight.data[11:16]  # other outputs of a block, other blocks
    assert torch.equal(apply(fewer, x), expected[:, 11:16])


@needs_kernel
def test_products_of_torch_in_between_change_nothing(path: None, threads: None) -> None:
    """They use matrix tiles, too, in the same threads, and configure them as they need them."""
    torch.manual_seed(0)
    layer, other = make_layer(96, 64), torch.randn(512, 512, dtype=DTYPE)
    inputs = [torch.randn(rows, 64, dtype=DTYPE) for rows in (1, 7, 16, 40, 70)]
    for count in (1, 2):
        torch.set_num_threads(count)
        product = torch.matmul(other, other)
        for x in inputs:
            y = apply(layer, x)
            assert torch.equal(torch.matmul(other, other), product)
            assert torch.equal(apply(layer, x), y), "as many rows as the time before"


@needs_kernel
@pytest.mark.usefixtures("path")
def test_infinity_and_nan() -> None:
    layer = make_layer(3, 4)
    weight = torch.tensor([[1, 1, 0, 0], [3e38, 3e38, 0, 0], [torch.nan, 0, 0, 0]])
    layer.weight.data = weight.to(DTYPE)
    output = apply(layer, torch.tensor([[1.0, 1, 1, 1]]).to(DTYPE))[0].tolist()
    assert output[:2] == [2, torch.inf]
    assert output[2] != output[2]


@needs_kernel
def test_changed_weights_are_packed_again() -> None:
    layer, x = make_layer(40, 50, bias=True), torch.randn(3, 50).to(DTYPE)
    layer.requires_grad_(False)
    with torch.no_grad(), PackedLinears(layer):
        assert_right(layer, x, layer(x))
        layer.weight.mul_(2)
        assert_right(layer, x, layer(x))
        layer.weight[7] = 3
        assert_right(layer, x, layer(x))
        layer.weight = nn.Parameter(torch.randn(40, 50).to(DTYPE))
        assert_right(layer, x, layer(x))
        layer.weight.data = torch.randn(50, 40).to(DTYPE).T.contiguous()
        assert_right(layer, x, layer(x))
        layer.bias.add_(1)
        assert_right(layer, x, layer(x))
        layer.bias = nn.Parameter(torch.randn(40).to(DTYPE))
        assert_right(layer, x, layer(x))
        layer.bias = None
        assert_right(layer, x, layer(x))
        layer.load_state_dict({"weight": torch.ones(40, 50)})
        assert_right(layer, x, layer(x))
        # What does not fit is left to torch.
        layer.weight = nn.Parameter(torch.randn(60, 50).to(DTYPE))
        assert layer(x).shape == (3, 60)
        layer.weight = nn.Parameter(torch.randn(40, 50).double())
        assert layer(x.double()).dtype == torch.float64


@needs_kernel
def test_changes_that_torch_does_not_tell_are_noticed_by_the_next() -> None:
    """PEFT merges a LoRA this way."""
    layer, x = make_layer(40, 50), torch.randn(3, 50).to(DTYPE)
    apply(layer, x)
    layer.weight.data += torch.randn(40, 50).to(DTYPE)
    assert_right(layer, x, apply(layer, x))


@needs_kernel
def test_weights_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(make_layer(40, 50), make_layer(9, 40)), torch.randn(3, 50).to(DTYPE)
    packed = []
    pack = linear._Packed._pack
    monkeypatch.setattr(
        linear._Packed,
        "_pack",
        lambda self, layer, *a: packed.append(layer) or pack(self, layer, *a),
    )
    for _ in range(2):
        with torch.no_grad(), PackedLinears(model):
            model(x)
            model(x)
    assert packed == list(model)
    model[1] = make_layer(9, 40)
    apply(model[0], x)
    with PackedLinears(model):
        pass
    assert packed[2:] == [model[1]]


@needs_kernel
def test_nothing_is_left_in_the_model() -> None:
    model = nn.Sequential(make_layer(40, 50), nn.ReLU())
    before, attributes = copy.deepcopy(model.state_dict()), list(vars(model[0]))
    fired = []
    model[0].register_forward_hook(lambda module, inputs, output: fired.append(output))
    x = torch.randn(3, 50).to(DTYPE)
    with torch.no_grad(), PackedLinears(model):
        output = model[0](x)
        assert fired[-1] is output
        assert list(model.state_dict()) == list(before)
    assert list(vars(model[0])) == attributes
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert len(linear._packed) >= 1
    model[0]._forward_hooks.clear()
    pickle.loads(pickle.dumps(copy.deepcopy(model)))(x)
    with pytest.raises(ValueError, match="stop"), PackedLinears(model):
        raise ValueError("stop")
    assert list(vars(model[0])) == attributes


@needs_kernel
def test_a_layer_is_forgotten_with_its_packed_weights() -> None:
    before = len(linear._packed)
    layer = make_layer(40, 50)
    apply(layer, torch.randn(3, 50).to(DTYPE))
    assert len(linear._packed) == before + 1
    del layer
    assert len(linear._packed) == before


@needs_kernel
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_what_is_left_to_torch() -> None:
    class Special(nn.Linear):
        pass

    replaced = make_layer(4, 4)
    replaced.forward = lambda x: x
    with torch.inference_mode():
        silent = make_layer(4, 4)
    layers = [nn.Linear(4, 4).double(), nn.Linear(4, 4).half(), Special(4, 4).to(DTYPE), replaced]
    layers += [nn.Linear(4, 4, device="meta", dtype=DTYPE), nn.Linear(0, 4).to(DTYPE), silent]
    before = [vars(layer).get("forward") for layer in layers]
    with PackedLinears(nn.ModuleList(layers)):
        assert [vars(layer).get("forward") for layer in layers] == before
    assert vars(replaced)["forward"] is before[3]


@needs_kernel
def test_calls_that_are_left_to_torch() -> None:
    layer, x = make_layer(40, 50), torch.randn(3, 50).to(DTYPE)
    with PackedLinears(layer):
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        with torch.no_grad(), pytest.raises(RuntimeError):
            layer(x[:, 1:])
        with torch.no_grad(), pytest.raises(RuntimeError):
            layer(x.double())


@pytest.mark.parametrize("value", ["0", ""])
def test_without_kernels_torch_does_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.load_kernels.cache_clear()
    if value:
        monkeypatch.setenv("MARS_KERNELS", value)
    else:
        monkeypatch.setattr(linear, "load_kernels", lambda _: None)
    layer, x = make_layer(40, 50), torch.randn(3, 50).to(DTYPE)
    with torch.no_grad(), PackedLinears(layer):
        assert "forward" not in vars(layer)
        layer(x)
    compiler.load_kernels.cache_clear()


@needs_kernel
def test_threads_that_pack_the_same_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(make_layer(64, 64) for _ in range(30)))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: PackedLinears(model), range(8)))
    assert all(len(linears._forwards) == 30 for linears in made)
    with made[0]:  # another thread's, while this one computes
        assert len(PackedLinears(model)._forwards) == 30


def small_model(**overrides: object) -> PreTrainedModel:
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 200,
        "head_dim": 24,
        "max_position_embeddings": 90,
    }
    return make_model("llama", **(sizes | overrides)).to(BF16).to(DTYPE)


def tokens_of(row: int) -> list[int]:
    return torch.randint(4, 260, (64,), generator=torch.Generator().manual_seed(row)).tolist()


def open_rows(model: PreTrainedModel, tokens: list[list[int]], *, chunk: int = 512) -> Runner:
    runner = Runner(model, num_rows=len(tokens), max_positions=90, prefill_chunk=chunk)
    for _ in tokens:
        runner.add_row()
    return runner


def column_by_column(model: PreTrainedModel, tokens: list[int], start: int) -> Tensor:
    """Return the logits at the tokens from `start` on: a prompt, then one column a forward."""
    runner = open_rows(model, [tokens])
    ends = range(start + 1, len(tokens) + 1)
    return torch.stack([runner.forward(0, [tokens[:end]], [RowPlan()])[0][0, -1] for end in ends])


@needs_kernel
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)  # torch's silu in float32 differs
@pytest.mark.parametrize("attention_bias", [False, True])
def test_a_position_gets_the_same_logits_in_any_batch(attention_bias: bool) -> None:
    """Bit by bit: 1 to 8 rows of 1 to 45 columns against one row, one column at a time."""
    model = small_model(attention_bias=attention_bias, mlp_bias=attention_bias)
    starts = [3 + 2 * row for row in range(8)]
    expected = [column_by_column(model, tokens_of(row), starts[row]) for row in range(8)]
    for num_rows in range(1, 9):
        tokens = [tokens_of(row) for row in range(num_rows)]
        for columns in (1, 2, 3, 5, 8, 9, 16, 17, 25, 32, 33, 34, 45):
            runner = open_rows(model, tokens, chunk=4 if columns % 2 else 512)
            prompts = [row[:start] for row, start in zip(tokens, starts, strict=False)]
            runner.forward(0, prompts, [RowPlan()] * num_rows)
            # As far as it goes drafts, then groups of masks.
            num_drafts = min(columns - 1, 8)
            masks = columns - 1 - num_drafts
            fed = [row[: len(prompt) + 1] for row, prompt in zip(tokens, prompts, strict=True)]
            plans = [
                RowPlan(
                    tuple(row[len(part) : len(part) + num_drafts]), (0,) if masks else (), masks
                )
                for row, part in zip(tokens, fed, strict=True)
            ]
            real, _ = runner.forward(0, fed, plans)
            for row in range(num_rows):
                assert torch.equal(real[row], expected[row][: num_drafts + 1]), (num_rows, columns)


@needs_kernel
@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
def test_prompts_are_read_alike_in_any_company() -> None:
    model = small_model()
    tokens = [tokens_of(row)[: 20 + 5 * row] for row in range(8)]
    together = open_rows(model, tokens)
    logits, _ = together.forward(0, tokens, [RowPlan()] * 8)
    for row, part in enumerate(tokens):
        for chunk in (1, 7, 512):
            alone = open_rows(model, [part], chunk=chunk)
            assert torch.equal(alone.forward(0, [part], [RowPlan()])[0][0], logits[row])
            for mine, theirs in zip(alone.cache.keys, together.cache.keys, strict=True):
                assert torch.equal(mine[0, :, : len(part)], theirs[row, :, : len(part)])


@needs_kernel
def test_the_lora_of_masks_acts(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model, tokens = small_model(), tokens_of(0)[:9]
    plan = RowPlan(groups=(0,), window=3)
    plain = open_rows(model, [tokens]).forward(0, [tokens], [plan])
    config = GatedConfig(
        base=None, fingerprint="", block_size=4, rank=4, targets=("q_proj",), mask_embeddings=4
    )
    adapter = GatedAdapter(model, config)
    for layer in adapter.lora_b:
        nn.init.normal_(layer.weight)
    gated = open_rows(model, [tokens]).forward(0, [tokens], [plan])
    assert torch.equal(plain[0], gated[0])
    assert not torch.equal(plain[1], gated[1])


@needs_bf16
@pytest.mark.parametrize(("rows", "start"), [(1, 0), (1, 5), (3, 2)])
@pytest.mark.parametrize("rank", [1, 8, 14])
def test_lora_in_one_call_equals_layer_by_layer(rows: int, start: int, rank: int) -> None:
    torch.manual_seed(rank)
    a, b = (nn.Linear(k, n, bias=False).to(BF16) for k, n in ((70, rank), (rank, 45)))
    x, y = torch.randn(rows, 9, 70).to(BF16), torch.randn(rows, 9, 45).to(BF16)
    with torch.no_grad(), PackedLinears(a, b):
        expected = y.clone()
        expected[:, start:] += b(a(x[:, start:]))
        changed = y.clone()
        assert add_lora(a, b, x, changed, start)
    assert torch.equal(changed, expected)
    assert torch.equal(changed[:, :start], y[:, :start])
    assert not torch.equal(changed[:, start:], y[:, start:])


@needs_bf16
def test_lora_is_left_to_torch_where_the_kernel_does_not_fit() -> None:
    a, b = (nn.Linear(k, n, bias=False).to(BF16) for k, n in ((64, 8), (8, 32)))
    x, y = torch.randn(2, 4, 64).to(BF16), torch.zeros(2, 4, 32).to(BF16)
    with torch.no_grad():
        assert not add_lora(a, b, x, y, 1), "outside of the block"
        with PackedLinears(a, b):
            assert not add_lora(a, b, x.float(), y, 1)
            assert not add_lora(a, b, x.transpose(0, 1), y, 1)
            assert add_lora(a, b, x, y, 1)
            y.zero_()
            b.weight.mul_(2)
            assert not add_lora(a, b, x, y, 1), "its weights have changed"
    assert not y.any()
