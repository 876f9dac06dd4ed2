"""The policy: a causal language model, and master weights that the optimizer moves.

With a 16-bit `dtype`, forward and backward run on a cast copy of float32 master weights. A copy rather than autocast,
because it is exactly what is published and served: sampler and trainer then differ by kernel numerics only. Each
microbatch's gradients are added up in the masters' precision.

The model stays in eval mode: dropout would make the importance ratio compare two different policies.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from workers.training.logprobs import token_logprobs
from workers.training.rows import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""By the spec's name. float64 is for measuring rounding errors."""


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A Hugging Face causal LM from a local directory (safetensors only, no code from it is run).

    Raises OSError or ValueError when the directory does not hold one, or weights are missing.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    cast(Any, logging).disable_progress_bar()
    loaded, info = cast(Any, AutoModelForCausalLM).from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    wrong = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if wrong:
        raise ValueError(f"{len(wrong)} tensors are missing or misshapen, e.g. {wrong[0]}")
    model = cast(nn.Module, loaded)
    return model.to(device).eval()


def loss_token_logprobs(model: nn.Module, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob and entropy, [N] each, of the batch's loss tokens under softmax(logits / temperature).

    The output head sees only the positions that predict a loss token, so logits are [N, V], not [B, T, V]. Rows are
    right-padded and attention is causal, so no mask is needed: a real token never sees padding.
    """
    targets = batch.input_ids[batch.row, batch.position]
    with _head_at(model, batch.row, batch.position - 1):
        logits = cast(Tensor, model(input_ids=batch.input_ids, use_cache=False).logits)
    return token_logprobs(logits[0], targets, temperature)


@contextmanager
def _head_at(model: nn.Module, row: Tensor, position: Tensor) -> Generator[None]:
    """Give the output head hidden states [1, N, H] instead of [B, T, H]. What the model does to logits after it stays."""

    def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][row, position].unsqueeze(0), *args[1:])

    head = cast(nn.Module, cast(Any, model).get_output_embeddings())
    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


class Policy:
    """A causal LM with master weights.

    `masters` maps each parameter's name (tied ones once) to its master: the parameter itself where it is at least float32,
    else a float32 copy, which has the gradients that `collect_gradients` adds to it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = dict(model.named_parameters())
        self.masters = {name: _master(parameter) for name, parameter in self._parameters.items()}

    @property
    def device(self) -> torch.device:
        return next(iter(self.masters.values())).device

    @property
    def vocab_size(self) -> int:
        """Token ids the embedding has."""
        return cast(Any, self.model).get_input_embeddings().weight.shape[0]

    def collect_gradients(self) -> None:
        """Add the last backward's gradients to the masters' and free them. Shared parameters have done so already."""
        for name, parameter in self._parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            master.grad.add_(parameter.grad)
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def drop_gradients(self) -> None:
        for tensor in (*self._parameters.values(), *self.masters.values()):
            tensor.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy moved masters into the model."""
        for name, parameter in self._parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


def _master(parameter: nn.Parameter) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if parameter.dtype == dtype else parameter.detach().to(dtype).requires_grad_()
