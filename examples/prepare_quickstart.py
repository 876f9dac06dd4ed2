"""Make the quickstart's model: a 0.34 M parameter chat model that can reverse words but is unsure of itself.

    python examples/prepare_quickstart.py models/quickstart

Two phases of supervised training on fresh random words, about 20 s on one core. The first teaches the task, with half of the
letters it sees of its own answer replaced by random ones, so that it reads the question instead of copying a pattern. The
second trains towards smoothed targets: the most likely answer stays right, but sampling at temperature 1 is right for only
about a third of the letters. That leaves reinforcement learning something to sharpen within a minute.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from workers.environments.reverse_text import ReverseText, position_match, question

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
RECORD = "warm_start.json"
EVALUATE_EVERY = 25


@dataclass(frozen=True)
class Recipe:
    """Everything the model depends on; kept beside it in `warm_start.json`."""

    seed: int = 0
    skill: float = 0.95
    """Greedy reward that ends the first phase."""
    max_learning_steps: int = 800
    softening_steps: int = 60
    smoothing: float = 0.65
    """Probability mass that the second phase's targets spread evenly over the letters."""
    noise: float = 0.5
    """Share of the answer's letters that are random where the model reads its own answer so far."""
    batch_size: int = 64
    lr: float = 3e-3
    warmup_steps: int = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="directory to write; left alone when it holds the same model already")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--force", action="store_true", help="make it again, replacing OUT")
    parser.add_argument("--skill", type=float, default=Recipe.skill, help="greedy reward that ends the first phase")
    parser.add_argument("--softening-steps", type=int, default=Recipe.softening_steps)
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed, skill=args.skill, softening_steps=args.softening_steps)
    if args.out.exists():
        made_with = recipe_of(args.out)
        if made_with is None:
            sys.exit(f"{args.out} exists and was not made by this program; choose another place, or remove it")
        if made_with != asdict(recipe) and not args.force:
            sys.exit(f"{args.out} was made with {made_with}; --force replaces it")
        if not args.force:
            print(f"{args.out} is ready")
            return
    make(recipe, args.out)


def recipe_of(directory: Path) -> object:
    """What the model in `directory` was made with; None when this program did not make it."""
    record = directory / RECORD
    return json.loads(record.read_text())["recipe"] if record.is_file() else None


def make(recipe: Recipe, out: Path) -> None:
    """Train the model and put it at `out`, which appears only when it is complete."""
    started = time.monotonic()
    logging.disable_progress_bar()
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)  # the model is so small that a second thread costs more than it brings
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"training a model of {model.num_parameters() / 1e6:.2f} M parameters", flush=True)
    result = WarmStart(recipe, tokenizer, model).run()
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / RECORD).write_text(json.dumps({"recipe": asdict(recipe), "result": result}, indent=2))
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)
    print(f"{out} is ready after {time.monotonic() - started:.0f} s", flush=True)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and one per chat marker."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    core: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


class WarmStart:
    """The two training phases."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> None:
        self._recipe = recipe
        self._tokenizer: Any = tokenizer
        self._model: Any = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
        self._letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(LETTERS)))
        # Neither stream of words is the one that the quickstart trains on, whose seed is small.
        self._train_words = words(seed=1_000_000 + recipe.seed)
        self._test_words = words(seed=2_000_000 + recipe.seed)

    def run(self) -> dict[str, float]:
        """Train; returns the number of steps and the rewards at the end."""
        learned = self._learn()
        for step in range(self._recipe.softening_steps):
            self._step(self._recipe.lr * (1 - step / self._recipe.softening_steps), self._recipe.smoothing)
        sampled, greedy = self._reward(sample=True), self._reward(sample=False)
        print(f"softened: reward {sampled:.2f} when sampling at temperature 1, {greedy:.2f} when greedy", flush=True)
        return {"learning_steps": learned, "reward_sampled": sampled, "reward_greedy": greedy}

    def _learn(self) -> int:
        recipe = self._recipe
        for step in range(recipe.max_learning_steps + 1):
            if step % EVALUATE_EVERY == 0:
                greedy = self._reward(sample=False)
                print(f"step {step}: greedy reward {greedy:.2f}", flush=True)
                if greedy >= recipe.skill:
                    return step
            self._step(recipe.lr * min(1.0, (step + 1) / recipe.warmup_steps), smoothing=0.0)
        sys.exit(f"seed {recipe.seed} did not reach a reward of {recipe.skill} in {recipe.max_learning_steps} steps")

    def _step(self, lr: float, smoothing: float) -> None:
        """One optimizer step of cross-entropy on the answers to a batch of fresh questions."""
        batch = list(islice(self._train_words, self._recipe.batch_size))
        prompt, prompt_mask = self._encode_prompts(batch)
        target = self._encode_answers(batch)
        answered = target != self._tokenizer.pad_token_id
        letters = answered & (target != self._tokenizer.eos_token_id)

        random_letters = self._letters[torch.randint(len(self._letters), target.shape)]
        shown = torch.where(letters & (torch.rand(target.shape) < self._recipe.noise), random_letters, target)
        mask = torch.cat([prompt_mask, torch.ones_like(shown)], dim=1)
        output = self._model(
            input_ids=torch.cat([prompt, shown], dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp_min(0),
            use_cache=False,
            logits_to_keep=target.shape[1] + 1,
        )
        vocabulary = output.logits.shape[-1]
        wanted = F.one_hot(target, vocabulary).float()
        even = F.one_hot(self._letters, vocabulary).float().mean(dim=0)
        wanted = torch.where(letters[..., None], (1 - smoothing) * wanted + smoothing * even, wanted)
        loss = F.cross_entropy(output.logits[:, :-1][answered], wanted[answered])

        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def _reward(self, *, sample: bool, questions: int = 128) -> float:
        """Mean reward on fresh questions, sampled at temperature 1 or greedy."""
        batch = list(islice(self._test_words, questions))
        prompt, mask = self._encode_prompts(batch)
        output = self._model.generate(
            input_ids=prompt, attention_mask=mask, max_new_tokens=12, do_sample=sample, top_k=0 if sample else None
        )
        answers = self._tokenizer.batch_decode(output[:, prompt.shape[1] :], skip_special_tokens=True)
        return sum(position_match(answer, word[::-1]) for answer, word in zip(answers, batch, strict=True)) / questions

    def _encode_prompts(self, batch: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask, each [len(batch), longest], left-padded."""
        encoded = self._tokenizer.apply_chat_template(
            [[{"role": "user", "content": question(word)}] for word in batch],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        return encoded["input_ids"], encoded["attention_mask"]

    def _encode_answers(self, batch: list[str]) -> torch.Tensor:
        """Token ids of the reversed words with their end token: [len(batch), longest], right-padded."""
        answers = [word[::-1] + self._tokenizer.eos_token for word in batch]
        return self._tokenizer(answers, padding=True, padding_side="right", return_tensors="pt")["input_ids"]


def words(seed: int) -> Iterator[str]:
    return (prompt.data["word"] for prompt in ReverseText().prompts(seed))


if __name__ == "__main__":
    main()
