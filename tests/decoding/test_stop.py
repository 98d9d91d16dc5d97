import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mars.decoding.stop import Detokenizer, StopChecker, StopRules, StopStrings

EOS = 0
# Whole words, parts of stop strings, characters whole and cut anywhere, and bytes of no character.
PIECES = [b"", b"a", b"b", b"ab", b"ba", b" end", b"e", b"nd", "é".encode(), "€".encode()]
PIECES += [
    b"\xe2",
    b"\x82",
    b"\xac",
    b"\xe2\x82",
    b"\xacx",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\x80",
    b"\xff",
]
STOPS = ["a", "b", "ab", "ba", "aba", "end", " end", "é", "€", "€a", "😀", "bb", "nde"]

tokens_of_text = st.lists(st.integers(0, len(PIECES) - 1), max_size=60)


def decode(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")


def oracle(ids: list[int], rules: StopRules) -> tuple[list[int], str, str | None, int | str | None]:
    """Decode everything again after every token and look at all of it."""
    for count, token in enumerate(ids, 1):
        text = decode(ids[:count])
        ends = [(text.find(s) + len(s), text.find(s), s) for s in rules.strings if s in text]
        if ends:
            _, start, string = min(ends)
            return ids[:count], text[:start], "stop", string
        if token in rules.token_ids:
            return ids[:count], text, "stop", token
        if count == rules.max_new_tokens:
            return ids[:count], text, "length", None
    return ids, decode(ids), None, None


@given(
    tokens_of_text,
    st.lists(st.sampled_from(STOPS), max_size=4),
    st.sets(st.integers(0, len(PIECES) - 1), max_size=2),
    st.integers(1, 60),
)
@example([10, 11, 12, 1], ["€a"], set(), 60)
@example([17] * 40 + [1], ["a"], set(), 60)
@example([10] + [EOS] * 20 + [11, 12], [], set(), 23)
def test_checker_equals_the_naive_oracle(
    ids: list[int], stops: list[str], end_ids: set[int], budget: int
) -> None:
    rules = StopRules(token_ids=frozenset(end_ids), strings=tuple(stops), max_new_tokens=budget)
    checker = StopChecker(rules, decode)
    kept, pieces = [], []
    for token in ids:
        if checker.finish_reason is not None:
            break
        kept.append(token)
        pieces.append(checker.push(token))
    expected_ids, text, finish_reason, stop_reason = oracle(ids, rules)
    assert kept == expected_ids
    assert checker.num_tokens == len(kept)
    assert (checker.finish_reason, checker.stop_reason) == (finish_reason, stop_reason)
    shown = "".join(pieces)
    # A running text may be held back, but no more than could still change.
    assert shown == text if finish_reason else text.startswith(shown)
    if not finish_reason:
        held_back = len(text) - len(shown)
        assert held_back <= 3 + max((len(s) - 1 for s in stops), default=0)


@given(tokens_of_text)
def test_pieces_join_to_the_decoded_text(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == decode(ids)


def test_a_character_is_shown_when_its_last_byte_arrives() -> None:
    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(i) for i in (1, 10, 11, 12)] == ["a", "", "", "€"]


def test_a_possible_beginning_is_held_back_and_released() -> None:
    stops = StopStrings(["###"])
    assert stops.push("a#") == ("a", None)
    assert stops.push("#") == ("", None)
    assert stops.push("b") == ("##b", None)
    assert stops.push("x##") == ("x", None)
    assert stops.push("#y") == ("", "###")


def test_the_earliest_completion_wins_whatever_the_order() -> None:
    for strings in (["bcd", "ab"], ["ab", "bcd"]):
        assert StopStrings(strings).push("xabcd") == ("x", "ab")
    assert StopStrings(["b", "ab"]).push("xab") == ("x", "ab")  # complete at once: the longer


def test_end_token_on_the_last_place_is_a_stop() -> None:
    checker = StopChecker(StopRules(token_ids=frozenset({EOS}), max_new_tokens=1), decode)
    checker.push(EOS)
    assert (checker.finish_reason, checker.stop_reason) == ("stop", EOS)


def test_caller_may_end_the_text() -> None:
    checker = StopChecker(StopRules(strings=("ab",), max_new_tokens=9), decode)
    assert checker.push(1, last=True) == "a"  # no longer held back
    assert (checker.finish_reason, checker.stop_reason) == ("stop", None)


def sentencepiece_like() -> Tokenizer:
    """The decoder of Llama 2: words carry a leading space, which the first one loses."""
    words = [
        "▁Hello",
        "▁world",
        "▁",
        "s",
        "!",
        "▁▁▁",
        "<0x0A>",
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
        "</s>",
    ]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@given(st.lists(st.sampled_from([[0], [1], [2], [3], [4], [5], [6], [7, 8, 9], [10]]), max_size=30))
@example([[2], [0]])
@example([[10]] * 8 + [[0]])
@example([[0]] + [[10]] * 20 + [[1]])
def test_leading_spaces_survive_decoders_that_strip_them(groups: list[list[int]]) -> None:
    ids = [i for group in groups for i in group]
    tokenizer = sentencepiece_like()
    detokenizer = Detokenizer(tokenizer.decode)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


def test_byte_fallback_shows_no_broken_character() -> None:
    detokenizer = Detokenizer(sentencepiece_like().decode)
    assert [detokenizer.push(i) for i in (0, 7, 8, 9)] == ["Hello", "", "", "€"]


@pytest.mark.parametrize("ids", [[1], [17], [EOS], [10]])
def test_work_per_token_does_not_grow(ids: list[int]) -> None:
    longest = 0

    def counting(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    checker = StopChecker(StopRules(strings=("aaab",), max_new_tokens=10_000), counting)
    started = time.perf_counter()
    for _ in range(5_000):
        checker.push(ids[0])
    assert longest <= 17
    assert time.perf_counter() - started < 5
