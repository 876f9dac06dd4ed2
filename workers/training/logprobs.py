"""Log-probabilities and entropies of tokens from logits, with the memory of the logits and one gradient, no more.

Plain autograd keeps several float32 copies of [tokens, vocabulary]. Here the softmax is recomputed from the logits in the
backward pass, a block of tokens at a time.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Elements of one float32 block (16 MiB)."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target and entropy of each distribution softmax(logits / temperature).

    `logits` [N, V] of any float dtype; `targets` int64 [N] in [0, V). Returns two [N] tensors, float32 or the logits'
    dtype if that is wider; both are differentiable in `logits`. The softmax is computed in that dtype.
    """
    logprobs, entropies = cast("Any", _TokenLogprobs).apply(logits, targets, temperature)
    return logprobs, entropies


def _blocks(logits: Tensor) -> list[slice]:
    rows = max(1, BLOCK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


class _TokenLogprobs(torch.autograd.Function):
    """With z = logits / T, p = softmax(z), y the target and H the entropy:
    d log p_y / dz = onehot(y) - p;  dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
        log_totals, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for block in _blocks(logits):
            z = logits[block].to(dtype) / temperature
            total = z.logsumexp(-1)
            log_totals[block] = total
            logprobs[block] = z.gather(1, targets[block, None])[:, 0] - total
            entropies[block] = torch.special.entr(torch.softmax(z, -1)).sum(-1)
        ctx.save_for_backward(logits, targets, log_totals, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        grad_logprobs, grad_entropies = grads
        logits, targets, log_totals, entropies = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        grad = torch.empty_like(logits)
        for block in _blocks(logits):
            z = logits[block].to(log_totals.dtype) / ctx.temperature
            p = z.sub_(log_totals[block, None]).exp_()
            z_grad = torch.zeros_like(p)
            if grad_logprobs is not None:
                by_token = grad_logprobs[block, None]
                z_grad.sub_(p * by_token).scatter_add_(1, targets[block, None], by_token)
            if grad_entropies is not None:
                p_log_p = -cast(Tensor, torch.special.entr(p))
                z_grad.sub_((p_log_p + p * entropies[block, None]) * grad_entropies[block, None])
            grad[block] = z_grad.div_(ctx.temperature)
        return grad, None, None
