"""What a caller over HTTP is told when something cannot be done: a status, a stable code, and what to do about it."""

from __future__ import annotations

import msgspec

from ledger.errors import (
    CallFailedError,
    CallRefused,
    IllegalTransition,
    JournalError,
    LedgerError,
    RolloutClosed,
    TooManyCalls,
    UnknownRollout,
)
from ledger.reasons import CallFailure

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MAX_MESSAGE = 2000


class ApiError(Exception):
    """An answer in the shape of OpenAI's errors. `retry` tells OpenAI's clients whether to try again; None is up to them."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry: bool | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry = retry

    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        # A lone surrogate, which an error's text may hold, has no UTF-8.
        message = self.message[:MAX_MESSAGE].encode(errors="replace").decode()
        return msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}
        )


def refused(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """A request that will never be acceptable as it is."""
    return ApiError(400, code, message, param=param, retry=False)


def failed() -> ApiError:
    return ApiError(500, "internal", "the gate failed; the run's log has the traceback")


def ended() -> ApiError:
    return ApiError(503, "run_ended", "the run is ending; it takes no more calls", retry=False)


def is_fatal(error: Exception) -> bool:
    """Whether the ledger itself has failed: what is in memory may be ahead of the record, so the run has to end."""
    return isinstance(error, JournalError) or not isinstance(error, LedgerError)


def of_ledger(error: LedgerError) -> ApiError:
    """How a caller learns of an error of the ledger or the gate."""
    match error:
        case UnknownRollout():
            return ApiError(404, "unknown_rollout", str(error), retry=False)
        case RolloutClosed():
            text = f"{error}. Its reward has been given or it was ended; make calls before the rollout ends"
            return ApiError(409, "rollout_closed", text, retry=False)
        case TooManyCalls():
            text = f"{error}. Make fewer, or raise rollout.max_calls in the run's configuration"
            return ApiError(429, "too_many_calls", text, retry=False)
        case CallRefused():
            code = "context_length_exceeded" if error.kind == "prompt_too_long" else error.kind
            return refused(str(error), code=code)
        case CallFailedError(reason=CallFailure.TIMEOUT):
            return ApiError(504, "timeout", f"{error}. The call is on record as failed; it may be made again")
        case CallFailedError():
            return ApiError(503, error.reason.value, f"{error}. The call is on record as failed; it may be made again")
        case IllegalTransition():
            return ApiError(409, "conflict", str(error), retry=False)
        case _:
            return ApiError(503, "ledger_failed", f"{type(error).__name__}: {error}", retry=False)
