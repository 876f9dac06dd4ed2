"""Who may do what: each rollout has a key of its own, derived from the run's secret; the control plane has a token."""

from __future__ import annotations

import hmac
import secrets

from ledger.http.errors import ApiError

_BEARER = "bearer "


class Keys:
    """Fresh for each run; nothing is stored. A key is the HMAC-SHA256 of the rollout's id under the secret (RFC 2104)."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self.control_token = secrets.token_hex(32)

    def of(self, rollout_id: str) -> str:
        """The API key of one rollout."""
        return hmac.digest(self._secret, rollout_id.encode(), "sha256").hex()

    def check_agent(self, rollout_id: str, authorization: str | None) -> None:
        """Raises ApiError 401 or 403 unless the header carries this rollout's key."""
        key = _bearer(authorization, "the rollout's key (OPENAI_API_KEY, or the context's `api_key`)")
        if not _equal(key, self.of(rollout_id)):
            raise ApiError(
                403,
                "foreign_key",
                f"this is not the key of rollout {rollout_id!r}: each rollout has a key and a base URL of its own",
                retry=False,
            )

    def check_control(self, authorization: str | None) -> None:
        """Raises ApiError 401 or 403 unless the header carries the control plane's token."""
        token = _bearer(authorization, "the token in control.json, in the run's folder")
        if not _equal(token, self.control_token):
            raise ApiError(
                403, "wrong_token", "this is not this run's control token: read control.json again", retry=False
            )


def _bearer(authorization: str | None, what: str) -> str:
    if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
        raise ApiError(401, "missing_key", f"send the header `Authorization: Bearer <key>` with {what}", retry=False)
    return authorization[len(_BEARER) :]


def _equal(given: str, expected: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode())
