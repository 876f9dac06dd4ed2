"""Which failures of a model call are worth another attempt, whose fault they are, and how long to wait before it.

The class of a failure is decided where it happens and comes as data: `data` and `capture` are permanent for the call, and so
is `infra` that does not say it can be retried. A worker that cannot be reached, or was taken out, is `infra` by nature.
"""

from __future__ import annotations

from enum import Enum

from controller.config.schema import FailuresConfig
from controller.member import Quarantined, StaleWeights
from ledger.errors import CallFailedError, CallRefused
from ledger.reasons import CallFailure
from workers.rpc.errors import RemoteError, RpcTimeout, WorkerUnreachable

ENGINE_KINDS = frozenset({"engine_dead", "engine_restarting"})
"""The engine in the worker is gone: when it is back it has the weights of its start."""
PLANE_KINDS = frozenset({"staging_failed", "prefix_unavailable"})
"""The data plane's trouble, not the worker's."""


class Fault(Enum):
    """What a failed attempt says of the worker that it was made on."""

    NONE = 0
    """Nothing."""
    DOUBT = 1
    """It may be in trouble."""
    GONE = 2
    """It can do no calls until it has been brought back."""


def fault_of(error: Exception) -> Fault | None:
    """The worker's part in a failure that another attempt may not meet again; None for a permanent one."""
    match error:
        case Quarantined():
            return Fault.NONE
        case WorkerUnreachable():
            return Fault.DOUBT
        case StaleWeights():
            return Fault.GONE
        case RemoteError(failure=failure) if failure.failure_class == "infra" and failure.retryable:
            if failure.kind in ENGINE_KINDS:
                return Fault.GONE
            return Fault.NONE if failure.kind in PLANE_KINDS else Fault.DOUBT
        case _:
            return None


def in_ledgers_words(call_id: str, error: Exception) -> Exception:
    """A failure that ends the call, as the gate knows it; other errors as they are."""
    match error:
        case RemoteError(failure=failure) if failure.failure_class == "data":
            return CallRefused(failure.kind, failure.message)
        case RemoteError(failure=failure):
            reason = CallFailure.GENERATION_FAILED
            if failure.failure_class == "capture":
                reason = CallFailure.CAPTURE_FAILED
            elif failure.kind == "staging_failed":
                reason = CallFailure.STAGING_FAILED
            return CallFailedError(call_id, reason, f"{failure.kind}: {failure.message}")
        case RpcTimeout():
            return CallFailedError(call_id, CallFailure.TIMEOUT, str(error))
        case WorkerUnreachable() | Quarantined() | StaleWeights():
            return CallFailedError(call_id, CallFailure.GENERATION_FAILED, str(error))
        case _:
            return error


def pause_before(attempt: int, failures: FailuresConfig) -> float:
    """Seconds before attempt number `attempt` (1 is the second one): exponential, up to a bound."""
    return min(failures.backoff_s * 2 ** (attempt - 1), failures.max_backoff_s)
