"""Small models, heads, tokenizers and tensors that stand in for real ones."""

import copy
import inspect
import shutil
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specheads.errors import UserError
from specheads.pair.draft_vocabulary import keep_tokens
from specheads.pair.pair import Pair
from specheads.prompts.prompt import Prompt, text_id
from specheads.storage import runs

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").is_file()),
    reason="compiling needs g++ and Python's headers",
)


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return normally distributed numbers, which depend on the shape only."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


class CountingTokenizer:
    """Token i is the letter chr(97 + i)."""

    chat_template = None
    bos_token_id = None
    eos_token_id = None

    def __init__(self, size: int) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + i): i for i in range(self.size)}

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def decode(self, tokens, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + int(token)) for token in tokens)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(97 + token)


def tiny_llama(
    vocab_size: int,
    seed: int,
    scale: float = 1.0,
    layers: int = 1,
    window: int = 64,
    width: int = 16,
) -> LlamaForCausalLM:
    """Return a random Llama in float64 whose logits have a spread of about `scale`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=window,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(
                weight, std=scale / weight.shape[1] ** 0.5 if "embed" not in name else 1.0
            )
    return model


def tiny_pair(
    vocab_size: int = 3, scale: float = 1.0, window: int = 64, same: bool = False
) -> Pair:
    """Return a pair of random models over `vocab_size` letters; `same`: the draft is the target."""
    target = tiny_llama(vocab_size, seed=1, scale=scale, layers=2, window=window)
    draft = target if same else tiny_llama(vocab_size, seed=2, scale=scale, window=window)
    return Pair(
        target,
        draft,
        CountingTokenizer(vocab_size),
        "tiny",
        "tiny-target",
        "r1",
        "tiny-draft",
        "r2",
    )


def cut(pair: Pair, tokens: Iterable[int]) -> Pair:
    """Return a pair with a copy of the draft whose output has some tokens alone."""
    draft = copy.deepcopy(pair.draft)
    keep_tokens(draft, torch.tensor(list(tokens)))
    return replace(pair, draft=draft)


def all_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, T, V) of a model, minus infinity for those of tokens that its output
    lacks.
    """
    logits = model(tokens, use_cache=False).logits
    kept = getattr(model, "kept_tokens", None)
    if kept is None:
        return logits
    vocab_size = model.get_input_embeddings().weight.shape[0]
    whole = torch.full((*logits.shape[:-1], vocab_size), -torch.inf, dtype=logits.dtype)
    for place, token in enumerate(kept.tolist()):
        whole[..., token] = logits[..., place]
    return whole


def constant_head(prob: float, predicts: str = "next_token"):
    """Return a stand-in for a head that always predicts the same acceptance probability."""

    def head(features):
        return torch.full((len(next(iter(features.values()))),), prob, dtype=torch.float64).logit()

    head.config = SimpleNamespace(predicts=predicts, inputs=("hidden",), calibration=None)
    head.check_fits = lambda pair: None
    head.to = lambda device: head
    return head


def describe(rule) -> str:
    """Return a short name of a stopping rule, for test ids: its class and its first parameter."""
    first = next(
        (name for name in inspect.signature(type(rule)).parameters if name != "head"), None
    )
    return type(rule).__name__ + (f"({getattr(rule, first):g})" if first else "")


def drafted_length(rule, state, features):
    """Return how many tokens a round with constant features drafts, and the state after it."""
    for step in range(1, 100):
        state, stop = rule.step(state, features)
        if stop:
            return step, state
    raise AssertionError("the rule never stops")


@dataclass(frozen=True)
class FewPrompts:
    """A source of six prompts for each split."""

    def check_final(self):
        raise UserError("there are no final prompts.")

    def provenance(self):
        return {}

    def load(self, chats, responses=False):
        texts = {
            (split, i): f"def {split}_{i}(x):\n" for split in ("dev", "test") for i in range(6)
        }
        return [Prompt(text_id(text), split, text) for (split, _), text in texts.items()]


def release_runs():
    """Release the locks of run folders, as the end of a process does."""
    for lock in runs._locks.values():
        lock.release()
    runs._locks.clear()
