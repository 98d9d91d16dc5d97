import dataclasses
from typing import Any

import pytest

from mars.decoding.options import DecodingOptions
from mars.errors import UserError

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "fast"),
        ("layout", "quadratic"),
        ("max_groups", 0),
        ("ngram", 1),
        ("draft_threshold", 1.5),
        ("draft_threshold", NAN),
        ("logprobs", -1),
        ("logprobs", 21),
        ("confidence", "p"),
        ("threshold", -0.1),
        ("threshold", NAN),
        ("threshold", "0.9"),
        ("window", -1),
        ("window", 2.0),
        ("window", True),
        ("max_new_tokens", 0),
        ("max_new_tokens", None),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", 7),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("temperature", -1.0),
        ("temperature", INFINITY),
        ("temperature", 1e-4),
        ("temperature", 5e-324),
        ("temperature", False),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", NAN),
        ("presence_penalty", INFINITY),
        ("frequency_penalty", "1"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: INFINITY}),
        ("seed", 1.0),
        ("seed", 1 << 63),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        DecodingOptions(**{name: value})


def test_one_stop_string_is_not_taken_apart() -> None:
    assert DecodingOptions(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert DecodingOptions(stop=["a", "b"], stop_token_ids=3).stop == ("a", "b")  # type: ignore


@pytest.mark.parametrize(
    ("options", "is_ar"),
    [
        ({"mode": "ar"}, True),
        ({"mode": "threshold", "threshold": None}, True),
        ({"mode": "threshold", "threshold": None, "confidence": "entropy"}, True),
        ({"mode": "threshold", "threshold": 1.0}, True),
        ({"mode": "threshold", "threshold": 1.5, "confidence": "margin"}, True),
        ({"mode": "threshold", "threshold": 1.5, "confidence": "entropy"}, False),
        ({"mode": "threshold", "threshold": 0.999}, False),
        ({"mode": "threshold", "threshold": 0.0, "confidence": "entropy"}, False),
        ({"mode": "threshold", "window": 0}, True),
        ({}, False),
        ({"threshold": None}, False),
        ({"window": 0}, False),
        ({"ngram": False}, False),
        ({"window": 0, "ngram": False}, True),
    ],
)
def test_which_options_mean_ar(options: dict[str, Any], is_ar: bool) -> None:
    assert DecodingOptions(**options).is_ar == is_ar


def test_the_threshold_mode_has_no_logprobs() -> None:
    with pytest.raises(UserError, match=r"logprobs.*threshold"):
        DecodingOptions(mode="threshold", logprobs=2)
    assert DecodingOptions(mode="threshold", threshold=None, logprobs=2).is_ar


def test_every_field_has_a_default_and_is_frozen() -> None:
    options = DecodingOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 1  # type: ignore[misc]
    assert dataclasses.replace(options) == options
