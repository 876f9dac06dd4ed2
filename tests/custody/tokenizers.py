"""Tokenizers and chat templates that make retokenization go wrong: merges across every boundary, and templates that rewrite
history, trim it, or mark roles in plain text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ["<|pad|>", "<|end|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
QWEN3 = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]
QWEN3 += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Applied in this order, to whole texts: there is no pre-tokenizer, so they cross words, lines and turns.
MERGES = [
    *(
        ("\n", "\n"),
        (".", "\n"),
        (":", " "),
        (" ", " "),
        ("\n", "U"),
        ("\n", "A"),
        ("a", "b"),
        ("b", "a"),
        ("ab", "ab"),
    ),
    *((".\n", "\n"), ("\n\n", "A"), ("\n\n", "U"), ("ab", "."), ("ab.", "\n"), ("b", " "), (" ", "a"), ("A", ":")),
    *(
        ("!", "\n"),
        ("<", "|"),
        ("|", ">"),
        ("e", "n"),
        ("en", "d"),
        ("<|", "end"),
        ("o", "k"),
        ("k", "."),
        ("\n\n", "\n"),
    ),
]

NEWLINES = """\
{%- for m in messages -%}
{{- '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}
"""
PLAIN_ROLES = """\
{%- for m in messages -%}
{{- {'user': 'U', 'assistant': 'A', 'system': 'S', 'tool': 'T'}[m['role']] + ': ' + m['content'] + '<|end|>\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'A: ' }}{% endif -%}
"""
TRIMS = """\
{%- for m in messages -%}
{%- if m['role'] == 'tool' -%}
{{- '<|user|>[output: ' + (m['content'] | trim) + ']<|end|>\\n' -}}
{%- else -%}
{{- '<|' + m['role'] + '|>' + (m['content'] | trim) + '<|end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""
STRIPS_REASONING = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- set text = m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] -%}
{{- '<|' + m['role'] + '|>' -}}
{%- if m['role'] == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>' + (m['reasoning_content'] or '') + '</think>' -}}
{%- endif -%}
{{- text + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""
TEMPLATES = {
    "newlines": NEWLINES,
    "plain roles": PLAIN_ROLES,
    "trims": TRIMS,
    "strips reasoning": STRIPS_REASONING,
}
"""Beside these, "qwen3" is rendered by the known model's own renderer."""


def merging_tokenizer(template: str | None, special: list[str] = SPECIAL) -> Any:
    """A byte-pair encoding over printable ASCII and newline, with `MERGES`."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    symbols = dict.fromkeys([*special, "\n", *map(chr, range(32, 127)), *("".join(pair) for pair in MERGES)])
    vocab = {token: i for i, token in enumerate(symbols)}
    tokenizer: Any = Tokenizer(models.BPE(vocab, MERGES, unk_token="<|unk|>" if "<|unk|>" in special else None))
    tokenizer.decoder = decoders.Fuse()
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>" if "<|end|>" in special else "<|im_end|>",
        additional_special_tokens=[token for token in special if "think" not in token and "tool_" not in token],
        clean_up_tokenization_spaces=False,
    )
    if special is QWEN3:
        wrapped.add_tokens([token for token in special if "think" in token or "tool_" in token])
    wrapped.chat_template = template
    return wrapped


def saved(folder: Path, kind: str) -> Path:
    """A directory of tokenizer files; `kind` is one of `TEMPLATES`, or "qwen3"."""
    if kind == "qwen3":
        folder = folder / "Qwen" / "Qwen3-0.6B"
        merging_tokenizer(None, QWEN3).save_pretrained(folder)
    else:
        merging_tokenizer(TEMPLATES[kind]).save_pretrained(folder)
    return folder
