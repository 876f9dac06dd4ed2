"""Identities: what a rollout, call and staging key may look like."""

from __future__ import annotations

import re

ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CHAT = "chatcmpl-"
_TEXT = "cmpl-"


def check_rollout_id(rollout_id: str) -> str:
    """Return `rollout_id` if it is legal; raise ValueError otherwise."""
    if ROLLOUT_ID.fullmatch(rollout_id) is None:
        raise ValueError(
            f"rollout id {rollout_id!r} is not allowed: 1 to 128 of letters, digits, '.', '_', '-', "
            "the first a letter or digit"
        )
    return rollout_id


def call_id(rollout_id: str, seq: int) -> str:
    """The id of a rollout's `seq`-th call (0-based)."""
    return f"{rollout_id}/{seq}"


def rollout_of(call_id: str) -> str:
    """The rollout that a call id belongs to ("" when it is not a call id)."""
    return call_id.rpartition("/")[0]


def staging_key(call_id: str, digest: str) -> str:
    """The data-plane key of a call's tokens. The digest's first 8 hex digits keep two generations of one call apart."""
    return f"{call_id}-{digest[:8]}"


def response_id(call_id: str, *, chat: bool) -> str:
    """The id that an agent over HTTP sees on the answer to a call."""
    return f"{_CHAT if chat else _TEXT}{call_id}"


def call_of(name: str) -> str:
    """The call that `name` stands for: a response's id, or a call id itself."""
    prefix = next((prefix for prefix in (_CHAT, _TEXT) if name.startswith(prefix)), "")
    return name[len(prefix) :]
