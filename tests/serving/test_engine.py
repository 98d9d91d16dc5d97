"""The engine's threads: what comes out is what `generate` gives, and nobody waits in vain."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mars import Engine
from mars.checkpoint import Checkpoint
from mars.decoding.generate import generate
from mars.decoding.options import DecodingOptions
from mars.serving.errors import EngineClosed, EngineFull, ForwardError
from mars.serving.handle import RequestHandle
from tests.decoding.test_generate import all_options, prompt_ids
from tests.serving.conftest import PATIENCE, Gate

LONG = DecodingOptions(mode="ar", max_new_tokens=400, ignore_eos=True)
SHORT = DecodingOptions(mode="ar", max_new_tokens=3, ignore_eos=True)
MIXED = [
    DecodingOptions(max_new_tokens=20),
    DecodingOptions(mode="ar", max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=3),
    DecodingOptions(mode="threshold", threshold=0.15, max_new_tokens=24, ignore_eos=True),
    DecodingOptions(max_new_tokens=30, ignore_eos=True, stop=("a", "qq"), repetition_penalty=1.2),
]


@pytest.fixture
def engine(llama: Checkpoint) -> Iterator[Engine]:
    """One row, one place to wait: easy to fill."""
    with Engine(llama, max_rows=1, max_waiting=1) as engine:
        yield engine


def hold(engine: Engine, after: int = 0) -> tuple[Gate, RequestHandle]:
    """Submit a request that holds the engine's thread."""
    gate = Gate(2, after)
    handle = engine.submit([9, 8], LONG, logits_hook=gate)
    gate.wait()
    return gate, handle


def said(handle: RequestHandle) -> list[int]:
    return handle.result(PATIENCE).token_ids


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(prompt_ids, all_options, st.booleans()), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([3, 512]),
)
def test_every_answer_is_that_of_generate(
    llama: Checkpoint,
    rows: list[tuple[list[int], DecodingOptions, bool]],
    max_rows: int,
    chunk: int,
) -> None:
    with Engine(llama, max_rows=max_rows, max_waiting=2, prefill_chunk=chunk) as engine:
        handles = []
        for ids, options, is_cancelled in rows:
            handles.append(engine.submit(ids, options))
            if is_cancelled:
                handles[-1].cancel()
        for handle, (ids, options, is_cancelled) in zip(handles, rows, strict=True):
            result, alone = handle.result(PATIENCE), generate(llama, ids, options)
            events = list(handle)
            assert [event.result for event in events] == [None] * (len(events) - 1) + [result]
            assert "".join(event.text for event in events) == result.text
            assert [t for event in events for t in event.token_ids] == result.token_ids
            if is_cancelled and result.finish_reason == "cancelled":
                assert alone.text.startswith(result.text)
                assert alone.token_ids[: len(result.token_ids)] == result.token_ids
            else:
                assert (result.text, result.token_ids) == (alone.text, alone.token_ids)
                assert result.finish_reason == alone.finish_reason
                assert result.stop_reason == alone.stop_reason


def test_many_threads_share_an_engine(llama: Checkpoint) -> None:
    prompts = ["hello there", "x", "what is the capital of France?", "naïve €"]
    cases = [(prompt, options) for prompt in prompts for options in MIXED]
    expected = [generate(llama, *case).token_ids for case in cases]
    with Engine(llama, max_rows=3, max_waiting=2) as engine, ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda case: said(engine.submit(*case)), cases)) == expected


def test_events_come_while_the_answer_is_written(engine: Engine) -> None:
    gate, handle = hold(engine, after=3)
    events = iter(handle)
    first = [next(events) for _ in range(3)]
    assert not handle.done()
    with pytest.raises(TimeoutError, match="request 0"):
        handle.result(0.01)
    gate.open()
    rest = list(events)
    assert list(handle) == [*first, *rest]
    assert rest[-1].result == handle.result()
    assert handle.done()


def test_a_cancelled_request_keeps_what_it_has_said(engine: Engine, llama: Checkpoint) -> None:
    gate, handle = hold(engine, after=5)
    handle.cancel()
    handle.cancel()
    gate.open()
    result = handle.result(PATIENCE)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == generate(llama, [9, 8], LONG).token_ids[:6]
    handle.cancel()  # no effect any more
    assert handle.result() is result


def test_a_waiting_request_is_cancelled_or_timed_out_where_it_waits(engine: Engine) -> None:
    for kind in ("cancelled", "timeout"):
        gate, first = hold(engine)
        waiting = engine.submit([7], SHORT, timeout=0.01 if kind == "timeout" else None)
        assert (engine.num_running, engine.num_waiting) == (1, 1)
        if kind == "cancelled":
            waiting.cancel()
        else:
            threading.Event().wait(0.02)
        first.cancel()
        gate.open()
        result = waiting.result(PATIENCE)
        assert (result.finish_reason, result.token_ids, result.forwards) == (kind, [], 0)


def test_a_running_request_is_timed_out(
    engine: Engine, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(2, after=5)
    handle = engine.submit([9, 8], LONG, timeout=10 * PATIENCE, logits_hook=gate)
    gate.wait()
    monkeypatch.setattr(engine._scheduler, "_clock", lambda: time.monotonic() + 20 * PATIENCE)
    gate.open()
    result = handle.result(PATIENCE)
    assert result.finish_reason == "timeout"
    assert result.token_ids == generate(llama, [9, 8], LONG).token_ids[:6]


def test_back_pressure(engine: Engine, llama: Checkpoint) -> None:
    gate, first = hold(engine)
    engine.submit([7], SHORT)
    with pytest.raises(EngineFull, match="max_waiting"):
        engine.submit([6], SHORT, block=False)
    with pytest.raises(EngineFull, match="2 requests"):
        engine.submit([6], SHORT, timeout=0.01)
    with ThreadPoolExecutor(3) as pool:
        blocked = [pool.submit(engine.submit, [token], SHORT) for token in (6, 5, 4)]
        assert not any(future.done() for future in blocked)
        first.cancel()
        gate.open()
        for token, future in zip((6, 5, 4), blocked, strict=True):
            assert said(future.result(PATIENCE)) == generate(llama, [token], SHORT).token_ids
    assert said(engine.submit([6], SHORT, block=False)) == generate(llama, [6], SHORT).token_ids


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("broken on purpose")


@pytest.mark.parametrize("hook", ["logits_hook", "stop_hook"])
def test_a_failing_hook_is_its_own_requests_matter(llama: Checkpoint, hook: str) -> None:
    with Engine(llama, max_rows=3) as engine:
        good = [engine.submit([token], SHORT) for token in range(4, 10)]
        bad = engine.submit([9], SHORT, **{hook: broken})
        good += [engine.submit([token], SHORT) for token in range(10, 16)]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
                bad.result(PATIENCE)
        with pytest.raises(ZeroDivisionError):
            list(bad)
        for token, handle in enumerate(good, start=4):
            assert said(handle) == generate(llama, [token], SHORT).token_ids
    (note,) = caught.value.__notes__
    assert "in broken" in note, "where it happened"


@pytest.mark.usefixtures("stock_forward")
def test_a_failed_forward_is_not_the_end(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(llama, max_rows=2) as engine:
        gate, first = hold(engine)
        beside = engine.submit([7], LONG)
        waiting = [engine.submit([token], SHORT) for token in (6, 5)]
        cache = weakref.ref(engine._scheduler._runner.cache)
        forward, calls = llama.model.forward, []

        def fails_at_third(**kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise torch.OutOfMemoryError("no memory, on purpose")
            return forward(**kwargs)

        monkeypatch.setattr(llama.model, "forward", fails_at_third)
        gate.open()
        for handle in (first, beside):
            with pytest.raises(
                ForwardError, match=r"2 requests that ran.*lower max_rows"
            ) as caught:
                handle.result(PATIENCE)
            assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        for token, handle in zip((6, 5), waiting, strict=True):
            assert said(handle) == generate(llama, [token], SHORT).token_ids
        gc.collect()
        assert cache() is None, "the error holds on to the cache"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(llama, max_rows=1)
    gate, first = hold(engine)
    waiting = engine.submit([7], SHORT)
    monkeypatch.setattr(engine._scheduler, "expire", broken)
    gate.open()
    for handle in (first, waiting):
        with pytest.raises(ForwardError, match="on purpose"):
            handle.result(PATIENCE)
    with pytest.raises(EngineClosed):
        engine.submit([7], SHORT)
    engine.close()


def test_close_waits_for_what_was_accepted(llama: Checkpoint) -> None:
    engine = Engine(llama, max_rows=1, max_waiting=1)
    gate, first = hold(engine)
    second = engine.submit([7], SHORT)
    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(engine.submit, [6], SHORT)
        while not engine._queue._offered:
            threading.Event().wait(0.001)
        closing = pool.submit(engine.close)
        with pytest.raises(EngineClosed):
            blocked.result(PATIENCE)
        assert not closing.done()
        gate.open()
        closing.result(PATIENCE)
    assert len(said(first)) == 400
    assert len(said(second)) == 3
    assert not engine._thread.is_alive()
    with pytest.raises(EngineClosed, match="closed"):
        engine.submit([6], SHORT)
    engine.close()


def test_close_cancels_if_asked_to(llama: Checkpoint) -> None:
    engine = Engine(llama, max_rows=1)
    gate, first = hold(engine)
    second = engine.submit([7], SHORT)
    closing = threading.Thread(target=engine.close, kwargs={"cancel": True})
    closing.start()
    while not engine._queue._is_closed:
        threading.Event().wait(0.001)
    gate.open()
    closing.join(PATIENCE)
    assert not engine._thread.is_alive()
    assert [handle.result().finish_reason for handle in (first, second)] == ["cancelled"] * 2


def test_an_error_in_the_with_block_cancels(llama: Checkpoint) -> None:
    handles = []

    def fails() -> None:
        with Engine(llama) as engine:
            handles.append(engine.submit([9, 8], LONG))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert handles[0].done()
    assert handles[0].result().finish_reason == "cancelled"


def test_a_hook_may_close_the_engine(llama: Checkpoint) -> None:
    engine = Engine(llama)

    def hook(tokens: list[int]) -> bool:
        engine.close(cancel=True)
        return False

    assert engine.submit([9], LONG, stop_hook=hook).result(PATIENCE).finish_reason == "cancelled"
    engine._thread.join(PATIENCE)
    assert not engine._thread.is_alive()


def test_an_engine_that_was_forgotten_does_not_keep_python_from_ending() -> None:
    code = (
        "from tests.conftest import make_model, make_tokenizer\n"
        "from mars import Engine\n"
        "from mars.checkpoint import Checkpoint\n"
        "checkpoint = Checkpoint(model=make_model(), tokenizer=make_tokenizer(), name='tiny')\n"
        "engine = Engine(checkpoint)\n"
        "engine.submit('hello', max_new_tokens=400, ignore_eos=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_generate_keeps_the_order_and_starts_with_the_longest(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Any] = ["x", "hello there", [9, 8], "y" * 60, [{"role": "user", "content": "hm"}]]
    prompts *= 6
    with Engine(llama, max_rows=2, max_waiting=1) as engine:
        submitted, handles, most = [], weakref.WeakSet[RequestHandle](), [0]
        submit = engine.submit

        def spy(*args: Any, **kwargs: Any) -> RequestHandle:
            handle = submit(*args, **kwargs)
            handles.add(handle)
            submitted.append(len(handle.request.prompt_ids))
            most.append(len(handles))
            return handle

        monkeypatch.setattr(engine, "submit", spy)
        results = engine.generate(prompts, max_new_tokens=9, ignore_eos=True)
    expected = generate(llama, prompts, max_new_tokens=9, ignore_eos=True)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [r.prompt for r in results] == prompts
    assert all(first >= second for first, second in pairwise(submitted))
    gc.collect()
    assert max(most) <= 3 + 4, "more than the engine accepts are in memory"


def test_generate_names_the_prompt_that_is_wrong(engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt 2 of 3: The prompt is empty"):
        engine.generate(["a", "", "b"])
    for single in ("a", [4, 5]):
        with pytest.raises(ValueError, match="list of prompts"):
            engine.generate(single)
    assert engine.num_running == engine.num_waiting == 0


@pytest.mark.usefixtures("stock_forward")
def test_generate_gives_up_at_an_error(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(llama, max_rows=2, max_waiting=2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(llama.model, "forward", broken)
            with pytest.raises(ForwardError):
                engine.generate([[4], [5], [6]])
        assert said(engine.submit([7], SHORT)) == generate(llama, [7], SHORT).token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_rows": 0}, "max_rows must be an integer of at least 1; got 0"),
        ({"max_waiting": True}, "max_waiting"),
        ({"prefill_chunk": 0.5}, "prefill_chunk"),
        ({"max_positions": -1}, "max_positions"),
        ({"max_positions": 513}, "at most 512"),
    ],
)
def test_bad_settings(llama: Checkpoint, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(llama, **settings)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "empty"),
        ("hi", {"timeout": 0}, "timeout"),
        ("hi", {"timeout": "1"}, "timeout"),
        ("hi", {"tau": 1}, "Unknown option tau"),
        ([4] * 40, {}, "max_positions of 48"),
    ],
)
def test_bad_requests_are_refused_at_once(
    llama: Checkpoint, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with Engine(llama, max_positions=48) as engine:
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, max_new_tokens=9, **options)
        assert len(said(engine.submit([4] * 45, max_new_tokens=3, ignore_eos=True))) == 3


def test_a_model_that_does_not_say_its_context_needs_a_limit(llama: Checkpoint) -> None:
    class Silent(Checkpoint):
        context_length = None  # type: ignore[assignment]

    silent = Silent(model=llama.model, tokenizer=llama.tokenizer, name="silent")
    with pytest.raises(ValueError, match="Give max_positions"):
        Engine(silent)
    with Engine(silent, max_positions=40) as engine:
        assert len(said(engine.submit([4], max_new_tokens=3, ignore_eos=True))) == 3
