"""Tiny chat models with random weights, saved as ordinary Hugging Face directories in some 50 ms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ["<|pad|>", "<|end|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
END = SPECIAL.index("<|end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE, more_special: Sequence[str] = ()) -> Any:
    """One token per character (newline and printable ASCII), and the special tokens above; `more_special` come last."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127)), *more_special])}
    tokenizer: Any = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=[*SPECIAL[3:], *more_special],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def tiny_lm(arch: str = "llama", *, seed: int = 0, vocab_size: int = 103, **overrides: Any) -> Any:
    """A randomly initialised causal LM of a transformers family ("llama", "qwen2", "qwen3", "mistral", ...)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": 0,
    }
    config: Any = AutoConfig.for_model(arch, **(sizes | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_model(path: Path, *, arch: str = "llama", seed: int = 0, tokenizer: Any = None, **overrides: Any) -> Path:
    """Save `tiny_lm` and its tokenizer (`tiny_tokenizer()` unless given) to the folder `path`, and return it."""
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.save_pretrained(path)
    tiny_lm(arch, seed=seed, vocab_size=len(tokenizer), **overrides).save_pretrained(path)
    return path
