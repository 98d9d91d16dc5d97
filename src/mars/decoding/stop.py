"""Where a text ends, safe for several tokens at once. Knows neither torch nor a tokenizer.

`StopChecker` takes committed tokens one by one and answers with the text that may be shown. What
ends a text: an end token, a stop string, or the budget, whichever is complete first. Nothing
after it is kept, counted or shown. Text that may still turn out to be the beginning of a stop
string, or a character of which only some bytes have arrived, is held back.

Work per token is bounded: it does not grow with the length of the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Decode = Callable[[list[int]], str]
FinishReason = Literal["stop", "length", "cancelled", "timeout"]
"""Why a text ended. `stop`: an end token or a stop string; `length`: the budget is used up. Ended
from outside: `cancelled`, or `timeout`, its time was over."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A UTF-8 character has at most 4 bytes, so at most 3 replacement characters at the end of a text
# may yet become one (tokenizers with byte fallback show one for every byte they cannot use).
_MAX_INCOMPLETE = 3
# Tokens decoded again before a new one: enough for a decoder to see that the new one is not the
# first (it would strip its leading space), and to hold a character of 4 one-byte tokens.
_CONTEXT_TOKENS = 6
_MAX_CONTEXT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends a text."""

    token_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop ids."""
    strings: tuple[str, ...] = ()
    """Stop strings, none empty."""
    max_new_tokens: int
    """Budget, at least 1."""


class Detokenizer:
    """Turn tokens into text piece by piece, holding back incomplete characters.

    The pieces, with `flush()` as the last, join to `decode(all tokens)`. Only for bytes that are
    not UTF-8, and a `decode` that takes back characters on meeting them, may the number of
    replacement characters differ.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._shown = ""  # of the text of the context
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        window = [*self._context, token]
        text = self._decode(window)
        if text and text == self._shown + self._held and not self._decode([token]):
            return ""  # a special token; it must not push visible ones out of the context
        certain, self._held = _split_incomplete(text)
        if certain.startswith(self._shown):
            piece = certain[len(self._shown) :]
            self._shown = certain
        else:  # byte fallback shows a whole run of bytes as broken until its last one arrives
            piece, self._held = "", text[len(self._shown) :]
        self._context = window
        if len(window) > 2 * _CONTEXT_TOKENS:  # every time would decode twice as often
            self._shorten()
        return piece

    def flush(self) -> str:
        """Return the text held back; no token may follow."""
        held, self._held = self._held, ""
        return held

    def _shorten(self) -> None:
        """Forget old tokens, where a character ends: a decoder may read half of one differently."""
        longest = len(self._context)
        for length in range(_CONTEXT_TOKENS, min(longest, _CONTEXT_TOKENS + _MAX_INCOMPLETE + 1)):
            text = self._decode(self._context[-length:])
            if REPLACEMENT not in text:
                self._context, self._shown = self._context[-length:], text
                return
        if longest > _MAX_CONTEXT_TOKENS:  # a long run of broken characters
            self._context = self._context[-_MAX_CONTEXT_TOKENS:]
            self._shown, _ = _split_incomplete(self._decode(self._context))


class StopStrings:
    """Pass text on until the first stop string is complete, holding back possible beginnings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add a piece of text.

        Returns:
            The text before the stop string, as far as it is certain, and the stop string found,
            or None. Of two that are complete at the same character, the longer one counts.
        """
        # An occurrence that began in earlier text began within what was held back.
        text = self._held + piece
        found = [
            (start + len(string), start, string)
            for string in self._strings
            if (start := text.find(string)) >= 0
        ]
        if found:
            _, start, string = min(found)
            self._held = ""
            return text[:start], string
        certain = len(text) - self._possible_beginning(text)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """Return the text held back; none may follow."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0


class StopChecker:
    """Decide, token by token, what text to show and when a request ends.

    Attributes:
        num_tokens: tokens taken so far.
        finish_reason: None while the request goes on.
        stop_reason: the token id or the stop string that ended it.
    """

    def __init__(self, rules: StopRules, decode: Decode) -> None:
        self._rules = rules
        self._detokenizer = Detokenizer(decode)
        self._strings = StopStrings(rules.strings)
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def abort(self, reason: FinishReason) -> None:
        """End the request from outside. What is held back stays so: it is not certain."""
        assert self.finish_reason is None, "has ended already"
        self.finish_reason = reason

    def push(self, token: int, *, last: bool = False) -> str:
        """Take one token and return the text that may now be shown.

        Args:
            token: the next committed token; none may follow once `finish_reason` is set.
            last: the caller has a reason of its own to stop after this token.
        """
        assert self.finish_reason is None, "a token after the end"
        self.num_tokens += 1
        ends = last or token in self._rules.token_ids
        over = ends or self.num_tokens == self._rules.max_new_tokens
        piece = self._detokenizer.push(token)
        if over:
            piece += self._detokenizer.flush()
        text, string = self._strings.push(piece)
        if string is not None:
            self.finish_reason, self.stop_reason = "stop", string
        elif over:
            text += self._strings.flush()
            self.finish_reason = "stop" if ends else "length"
            self.stop_reason = token if token in self._rules.token_ids else None
        return text


def _split_incomplete(text: str) -> tuple[str, str]:
    """Split off the replacement characters that may be the bytes of an unfinished character."""
    certain = len(text)
    while certain > max(0, len(text) - _MAX_INCOMPLETE) and text[certain - 1] == REPLACEMENT:
        certain -= 1
    return text[:certain], text[certain:]
