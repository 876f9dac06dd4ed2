"""Trains the policy one step at a time: microbatch gradients add up, then clipping and one AdamW update.

Synchronous and single-threaded: the service gives each call to one compute thread. Weights move in `finish_step` and `load`
only; a failure anywhere else leaves them as the last finished step made them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor, nn

from workers.training.agreement import AgreementMeter
from workers.training.api import (
    BeginStep,
    LossSpec,
    Microbatch,
    MicrobatchDone,
    OptimizerSpec,
    StepMetrics,
    TrainerInfo,
)
from workers.training.errors import NonFinite, OutOfOrder
from workers.training.model import Policy, loss_token_logprobs
from workers.training.objective import TokenInputs, TokenSums, Totals, microbatch_loss
from workers.training.rows import Batch
from workers.training.step import StepState

Model = Literal["policy", "reference"]


class Trainer:
    """One rank's policy, its optimizer and the state of its step.

    `reference` is the frozen model of the KL term, needed when `loss.kl_coef` > 0. Raises ValueError for settings that
    contradict each other.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        optimizer: OptimizerSpec,
        loss: LossSpec,
        temperature: float,
        max_completion_tokens: int,
        reference: nn.Module | None = None,
    ) -> None:
        if temperature <= 0:
            raise ValueError(
                f"temperature is {temperature}; a policy is trained at the temperature it sampled with, > 0"
            )
        if loss.tis_cap is not None and loss.old_logprobs != "policy":
            raise ValueError("loss.tis_cap needs loss.old_logprobs: policy")
        if (reference is None) != (loss.kl_coef == 0):
            raise ValueError(
                f"loss.kl_coef is {loss.kl_coef}, and a reference model is {'not ' * (reference is None)}given"
            )
        self.policy = policy
        self.state = StepState()
        self.optimizer = torch.optim.AdamW(
            list(policy.masters.values()),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._optimizer_spec = optimizer
        self._loss = loss
        self._temperature = temperature
        self._max_tokens = max_completion_tokens
        self._reference = reference
        self._kept: dict[tuple[Model, str], Tensor] = {}
        self._sums = TokenSums()
        self._agreement = AgreementMeter()
        self._grad_norm = torch.zeros(())
        self._seconds = 0.0

    def info(self) -> TrainerInfo:
        parameters = sum(master.numel() for master in self.policy.masters.values())
        return TrainerInfo(parameters=parameters, step=self.state.step)

    def logprobs(self, step: int, model: Model, batch: Batch) -> None:
        """Compute the logprobs of the batch's loss tokens and keep them, by key, until step `step` is finished.

        What is not kept is computed when a microbatch needs it; calling this beforehand only moves the time.
        Raises OutOfOrder.
        """
        self.state.require_weights("logprobs")
        self.state.require_current("logprobs", step)
        if model == "reference" and self._reference is None:
            raise OutOfOrder("logprobs: there is no reference model, because loss.kl_coef is 0")
        with self._timed():
            per_row = torch.split(self._forward(model, batch), cast("list[int]", batch.row_tokens.tolist()))
            self._kept.update(((model, key), logprobs) for key, logprobs in zip(batch.keys, per_row, strict=True))

    def begin_step(self, request: BeginStep) -> None:
        """Open a step. Raises OutOfOrder."""
        self.state.begin(request)
        self.policy.drop_gradients()
        self._sums, self._agreement, self._seconds = TokenSums(), AgreementMeter(), 0.0

    def train_microbatch(self, request: Microbatch, batch: Batch) -> MicrobatchDone:
        """Add this microbatch's share of the step's gradient. `batch` holds the request's rows, in its order.

        Raises OutOfOrder (nothing changed) or NonFinite; that, or any other failure, breaks the step.
        """
        self.state.admit(request)
        where = f"step {request.step}, microbatch {request.index}"
        with self.state.breaks_step(), self._timed():
            logprobs, entropies = loss_token_logprobs(self.policy.model, batch, self._temperature)
            advantages, weights = torch.tensor(
                [[row.advantage for row in request.rows], [row.weight for row in request.rows]],
                dtype=logprobs.dtype,
                device=logprobs.device,
            )
            begun = self.state.begun
            inputs = TokenInputs(
                logprobs=logprobs,
                entropies=entropies,
                advantages=advantages[batch.row],
                old_policy=self._recall("policy", batch),
                reference=None if self._reference is None else self._recall("reference", batch),
                row_weights=weights[batch.row],
            )
            totals = Totals(begun.loss_tokens, begun.sequences, self._max_tokens)
            loss, sums = microbatch_loss(self._loss, batch, inputs, totals)
            if not math.isfinite(sums.loss):
                raise NonFinite(f"{where}: the loss is {sums.loss}; rows {_culprits(batch, inputs)}")
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            self.policy.collect_gradients()
            self._grad_norm = torch.nn.utils.get_total_norm(self.policy.gradients())
            if not self._grad_norm.isfinite():
                raise NonFinite(f"{where}: the gradient's norm is {self._grad_norm.item()}; rows {list(batch.keys)}")
            self._agreement.add(logprobs, batch.rollout_logprobs, request.step - batch.weight_versions)
        self._sums.add(sums)
        self.state.trained(request, batch.tokens)
        return MicrobatchDone(loss=sums.loss, tokens=batch.tokens)

    def finish_step(self, step: int) -> StepMetrics:
        """Clip the gradient's global norm, move the weights, and make the next step current. Raises OutOfOrder."""
        self.state.require_complete(step)
        rate = self._optimizer_spec.lr * min(1.0, (step + 1) / max(1, self._optimizer_spec.warmup_steps))
        with self.state.moves_weights(), self._timed():
            torch.nn.utils.clip_grads_with_norm_(
                list(self.policy.masters.values()), self._optimizer_spec.max_grad_norm, self._grad_norm
            )
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.policy.refresh()
            self.policy.drop_gradients()
        self._kept.clear()
        self.state.finished()
        sums = self._sums
        agreement, by_age = self._agreement.measure()
        return StepMetrics(
            loss=sums.loss,
            grad_norm=self._grad_norm.item(),
            lr=rate,
            entropy=sums.entropy / sums.tokens,
            clip_fraction=sums.clipped / sums.tokens,
            ratio_mean=sums.ratio / sums.tokens,
            agreement=agreement,
            agreement_by_age=by_age,
            kl_reference=None if self._reference is None else sums.kl_reference / sums.tokens,
            tokens=sums.tokens,
            seconds=self._seconds,
        )

    def drop_step(self, next_step: int) -> None:
        """Forget the open step and all kept logprobs: other weights have been loaded, and `next_step` is next."""
        self.policy.drop_gradients()
        self._kept.clear()
        self.state.reset(next_step)

    def _recall(self, model: Model, batch: Batch) -> Tensor | None:
        """Kept logprobs of the batch's loss tokens; the reference's are computed if they were not kept."""
        kept = [self._kept.get((model, key)) for key in batch.keys]
        if all(tensor is not None for tensor in kept):
            return torch.cat([tensor for tensor in kept if tensor is not None])
        return self._forward(model, batch) if model == "reference" else None

    @torch.no_grad()
    def _forward(self, model: Model, batch: Batch) -> Tensor:
        module = self.policy.model if model == "policy" else self._reference
        assert module is not None
        return loss_token_logprobs(module, batch, self._temperature)[0]

    @contextmanager
    def _timed(self) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start


def _culprits(batch: Batch, inputs: TokenInputs) -> list[str]:
    """Keys of the rows whose tokens are not finite; all of them when that shows in no single row."""
    bad = ~(inputs.logprobs.isfinite() & inputs.entropies.isfinite() & inputs.advantages.isfinite())
    rows = cast("list[int]", torch.unique(batch.row[bad]).tolist())
    return [batch.keys[i] for i in rows] or list(batch.keys)
