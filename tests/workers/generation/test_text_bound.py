"""A text is refused unread only when it has more tokens than fit, whatever the text is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import TEMPLATE, tiny_tokenizer
from workers.generation.text_bound import TextBound, TextTooLong

CONTEXT = 5
LONGEST = 8
"""Bytes of the longest token."""


def byte_level(normalizer: Any = None, before: Any = (), **added: Any) -> Any:
    """A BPE with the merges `a a`, `aa aa`, `aaaa aaaa`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "aa", "aaaa", "aaaaaaaa"]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner: Any = Tokenizer(models.BPE(vocab, [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    if normalizer is not None:
        inner.normalizer = normalizer
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=inner)
    wrapped.chat_template = TEMPLATE
    if added:
        from tokenizers import AddedToken

        wrapped.add_tokens([AddedToken("<m>", **added)])
    return wrapped


def refused(bound: TextBound, *texts: str) -> bool:
    try:
        bound.check(*texts)
    except TextTooLong as error:
        return error.tokens >= CONTEXT
    return False


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@given(text=st.text(st.sampled_from("aaaaaaab \n é\u0301ᄀ\u1161\u11a8😀")) | st.text())
@settings(deadline=None)
def test_no_text_that_fits_is_refused(normalizer: Any, text: str) -> None:
    tokenizer = byte_level(normalizer)
    bound = TextBound(tokenizer)
    bound.context = CONTEXT
    if refused(bound, text):
        assert len(tokenizer(text)["input_ids"]) >= CONTEXT


def test_a_text_of_too_many_bytes_is_refused_in_one_piece_or_more() -> None:
    bound = TextBound(byte_level())
    fits, fills = "a" * LONGEST * (CONTEXT - 1), "a" * (LONGEST * (CONTEXT - 1) + 1)
    assert not refused(bound, fills * 1000), "before the context is known"
    bound.context = CONTEXT
    assert not refused(bound, fits)
    assert refused(bound, fills)
    assert refused(bound, fits, "a")
    assert refused(bound, "😀" * LONGEST * CONTEXT)


@pytest.mark.parametrize(
    "tokenizer",
    [
        tiny_tokenizer(),
        byte_level(normalizers.NFKC()),
        byte_level(before=[pre_tokenizers.Split(" ", "removed")]),
        byte_level(lstrip=True),
    ],
    ids=["words", "another normalizer", "removes spaces", "takes in spaces"],
)
def test_a_tokenizer_that_may_make_little_of_much_text_refuses_nothing(tokenizer: Any) -> None:
    bound = TextBound(tokenizer)
    bound.context = CONTEXT
    assert not refused(bound, "a" * 100_000)
