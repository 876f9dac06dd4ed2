"""Refuses a text that has too many bytes for a model's context before it is tokenized, which would take seconds.

A token of a byte-level BPE stands for as many bytes as it is spelled with, and for no more: a text has at least as many
tokens as it has lengths of the longest one. Of other tokenizers nothing is known, and nothing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

_COMPOSED = 4
"""More than what NFC, which some of these tokenizers normalize to, makes a text shorter by: 3, for Hangul."""


class TextTooLong(ValueError):
    """`tokens` is the least number of tokens that the text has."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class TextBound:
    """What a Hugging Face tokenizer can be given when a prompt is to have less than `context` tokens (None: anything)."""

    def __init__(self, tokenizer: Any) -> None:
        self.context: int | None = None
        self._bytes_per_token = _bytes_per_token(tokenizer)

    def check(self, *texts: str) -> None:
        """Raises TextTooLong when the texts, one after the other, fill the context or more."""
        if self.context is None or self._bytes_per_token is None:
            return
        if 4 * sum(map(len, texts)) < self.context * self._bytes_per_token:  # a character has 4 bytes at most
            return
        least = -(-sum(len(text.encode(errors="surrogatepass")) for text in texts) // self._bytes_per_token)
        if least >= self.context:
            raise TextTooLong(least)


class _Part(msgspec.Struct):
    type: str = ""
    behavior: str = ""
    pretokenizers: Sequence[_Part] = ()


class _AddedToken(msgspec.Struct):
    lstrip: bool = False
    rstrip: bool = False


class _Tokenizer(msgspec.Struct):
    model: _Part
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None
    added_tokens: Sequence[_AddedToken] = ()


def _bytes_per_token(tokenizer: Any) -> int | None:
    """At most so many bytes of text become one token; None when nothing is known of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = msgspec.json.decode(backend.to_str(), type=_Tokenizer)
    splits = parts.pre_tokenizer or _Part()
    splits = splits.pretokenizers or (splits,)
    normalizer = "" if parts.normalizer is None else parts.normalizer.type
    if (
        parts.model.type != "BPE"
        or normalizer not in ("", "NFC")
        or not any(split.type == "ByteLevel" for split in splits)
        or any(split.behavior == "Removed" for split in splits)
        or any(token.lstrip or token.rstrip for token in parts.added_tokens)  # they take in all the space beside them
    ):
        return None
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    return longest * _COMPOSED if normalizer else longest
