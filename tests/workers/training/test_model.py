"""The forward pass against the model's own full logits, and the master weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny_model
from tests.workers.training.make import CPU, batch_of, make_trainer, random_rows, train_step, weights
from workers.training.api import OptimizerSpec
from workers.training.model import Policy, load_model, loss_token_logprobs

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, "sliding_window": 4},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_each_row_alone_through_the_whole_model(family: str, tmp_path: Path):
    model = load_model(str(tiny_model(tmp_path, arch=family, **FAMILIES[family])), torch.float64, CPU)
    rows = random_rows(6)
    logprobs, entropies = loss_token_logprobs(model, batch_of(rows), temperature=0.7)
    expected: list[torch.Tensor] = []
    for row in rows.values():
        ids, mask = torch.from_numpy(row["input_ids"])[None], torch.from_numpy(row["loss_mask"])[1:].bool()
        every = (model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1] / 0.7).log_softmax(-1)
        own = every.gather(1, ids[0, 1:, None])[:, 0]
        expected.append(torch.stack((own, -(every.exp() * every).sum(-1)))[:, mask])
    assert torch.allclose(torch.stack((logprobs, entropies)), torch.cat(expected, 1), rtol=1e-10, atol=1e-10)


def test_padding_changes_no_gradient(model: Path):
    def gradient(pad: int) -> torch.Tensor:
        policy = Policy(load_model(str(model), torch.float64, CPU))
        batch = batch_of(random_rows(5))
        padded = torch.nn.functional.pad(batch.input_ids, (0, pad), value=7)
        logprobs, entropies = loss_token_logprobs(
            policy.model, type(batch)(**{**batch.__dict__, "input_ids": padded}), temperature=1.0
        )
        (logprobs.sum() + entropies.sum()).backward()
        return torch.cat([g.flatten() for g in policy.gradients()])

    assert torch.allclose(gradient(0), gradient(9), rtol=1e-10, atol=1e-12)


def test_the_output_head_sees_the_loss_tokens_only(model: Path):
    lm: Any = load_model(str(model), torch.float32, CPU)
    seen: list[torch.Size] = []
    lm.lm_head.register_forward_hook(lambda _module, _args, output: seen.append(output.shape))
    batch = batch_of(random_rows(5))
    loss_token_logprobs(lm, batch, temperature=1.0)
    assert seen == [torch.Size([1, batch.tokens, lm.config.vocab_size])]
    lm(input_ids=batch.input_ids)
    assert seen[1][:2] == batch.input_ids.shape, "the selection must not outlive the call"


def test_full_precision_masters_are_the_parameters_themselves(model: Path):
    policy = Policy(load_model(str(model), torch.float32, CPU))
    assert all(policy.masters[name] is p for name, p in policy.model.named_parameters())


def test_bfloat16_keeps_float32_masters_and_serves_their_rounded_copy(model: Path):
    trainer = make_trainer(model, dtype=torch.bfloat16, optimizer=OptimizerSpec(lr=1e-4))
    before = weights(trainer)
    train_step(trainer, 0, random_rows(6))
    moved = sum(int((before[name] != master).sum()) for name, master in trainer.policy.masters.items())
    assert all(master.dtype == torch.float32 for master in trainer.policy.masters.values())
    assert moved > 0.9 * sum(master.numel() for master in trainer.policy.masters.values())
    for name, parameter in trainer.policy.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, trainer.policy.masters[name].bfloat16())


def test_bfloat16_gradients_of_many_microbatches_add_up_in_float32(model: Path):
    policy = Policy(load_model(str(model), torch.bfloat16, CPU))
    exact: dict[str, torch.Tensor] = {}
    for seed in range(20):
        loss_token_logprobs(policy.model, batch_of(random_rows(2, seed=seed)), temperature=1.0)[0].sum().backward()
        for name, parameter in policy.model.named_parameters():
            assert parameter.grad is not None
            exact[name] = exact.get(name, torch.zeros(())) + parameter.grad.double()
        policy.collect_gradients()
        assert all(parameter.grad is None for parameter in policy.model.parameters())
    for name, master in policy.masters.items():
        assert master.grad is not None
        assert torch.allclose(master.grad.double(), exact[name], rtol=1e-5, atol=1e-5)


def test_a_model_with_missing_weights_is_refused(tmp_path: Path):
    import safetensors.torch

    file = tiny_model(tmp_path) / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing.*model\.norm\.weight"):
        load_model(str(tmp_path), torch.float32, CPU)


def test_pickled_weights_are_never_read(tmp_path: Path):
    tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.ones(64)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_model(str(tmp_path), torch.float32, CPU)
