"""What does a training step of 20 heads cost next to one of a single head, and what share of the peak does distillation reach?

Heads are the paper's grid (five depths, four weights of rejection) on drafts of the shapes of Llama 2 7B and Llama 3.2 1B; a step
reads the draft's states, as with features_budget=0. Distillation trains a draft of 1B for a target of 8B. Weights and texts are
random. The steps are the package's losses and modules in a plain loop, without Lightning.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.machine import Machine
from benchmarks.results import Column, Table, Value
from benchmarks.steps import timed
from specheads import HeadConfig
from specheads.heads.batch import HeadBatch, head_features
from specheads.pair.language_model import LanguageModel
from specheads.replay.response_batch import ResponseBatch
from specheads.training.distill.distill_loss import (
    DistributionSource,
    computed_distributions,
    most_likely,
    stored_distributions,
    token_losses,
)
from specheads.training.heads.bank import HeadBank, HeadSpec

DEPTHS, REJECT_WEIGHTS, SINGLE = range(5), (1.0, 3.0, 6.0, 12.0), 3  # the depth of the head that is trained alone
HEAD_TEXTS, DISTILL_TEXTS, TEXT_TOKENS = 32, 16, 512
LABELLED = 0.85  # the share of positions that a head learns from, at the paper's mixing
STORED = 64  # tokens of each of the target's distributions that are stored
DIVERGENCE = "total_variation"  # the default of distillation


def training_tables(setup: Machine, goals: dict[str, float]) -> Iterator[Table]:
    """Yield the tables of distillation and of heads; put what was reached into `goals`."""
    timing = [Column("a step", "ms:1"), Column("tokens/s", "fixed:0"), Column("most memory, GiB", "fixed:1")]
    rows = [*Distilling(setup).rows()]
    goals["distillation"] = rows[0][-1]
    columns = [Column("the target's distributions"), Column("activations"), *timing, Column("of the peak", "percent")]
    yield Table("distillation", "Distillation of a draft of 1B from a target of 8B", columns, rows)
    rows = []
    for name in ("llama2",) if setup.tiny else ("llama2", "llama3"):
        rows += _head_rows(setup, name)
        goals.setdefault("twenty_heads", rows[-1][-1])  # of Llama 2, as in the paper
    columns = [Column("draft"), Column("heads"), *timing, Column("over one head", "ratio")]
    yield Table("heads", f"A training step of heads on {HEAD_TEXTS} texts of {TEXT_TOKENS} tokens", columns, rows)


def _timing_of(step: Callable[[], None], num_tokens: int, setup: Machine) -> list[Value]:
    """Return the median seconds of a training step, its tokens per second, and the most memory that it took."""
    on_gpu = setup.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setup.device)
    seconds = timed(step, setup.device, max(1, setup.repeats // 2))
    return [seconds, num_tokens / seconds, torch.cuda.max_memory_allocated(setup.device) / 2**30 if on_gpu else None]


def _random_texts(setup: Machine, num_texts: int, vocab_size: int) -> np.ndarray:
    """Return texts of random tokens, (num_texts, T) ids."""
    shape = (2, 24) if setup.tiny else (num_texts, TEXT_TOKENS)
    return np.random.default_rng(0).integers(0, vocab_size, shape)


def _head_rows(setup: Machine, name: str) -> Iterator[list]:
    """Yield the timing of a step of one head and of the grid, on the draft of a pair."""
    pair = setup.pair(name, only_draft=True)
    size, batch, single = pair.draft_lm.hidden_size, _head_batch(setup, pair.vocab_size), None
    for specs in (_grid(size, [SINGLE], [1.0]), _grid(size, DEPTHS, REJECT_WEIGHTS)):
        bank = HeadBank(specs, seed=0).to(setup.device)
        optimizer = torch.optim.AdamW(bank.parameters(), lr=1e-3)
        timing = _timing_of(partial(_head_step, bank, optimizer, pair.draft_lm, batch), batch.tokens.numel(), setup)
        single = single or timing[0]
        yield [pair.draft_id, str(len(specs)), *timing, timing[0] / single]


def _grid(hidden_size: int, depths: Sequence[int], weights: Sequence[float]) -> list[HeadSpec]:
    """Return heads on the draft's state, as the paper's."""
    return [
        HeadSpec(f"{depth}-{weight:g}", HeadConfig(hidden_size, depth=depth, predicts="input_token"), reject_weight=weight)
        for depth in depths
        for weight in weights
    ]


def _head_batch(setup: Machine, vocab_size: int) -> HeadBatch:
    """Return texts with a random label at most of their positions."""
    tokens = torch.from_numpy(_random_texts(setup, HEAD_TEXTS, vocab_size))
    row, index = torch.ones_like(tokens).nonzero().T
    labels = torch.rand(len(row), generator=torch.Generator().manual_seed(0))
    labels[labels > LABELLED] = torch.nan
    return HeadBatch(tokens, row, index, tokens.flatten(), labels / LABELLED).to(setup.device)


def _head_step(bank: HeadBank, optimizer: torch.optim.Optimizer, draft: LanguageModel, batch: HeadBatch) -> None:
    """Train a bank on a batch."""
    features = head_features(draft, batch, bank.predicts, bank.needs)
    sums, weights = bank.losses(bank(features), batch.label)
    (sums / weights).sum().backward()
    bank.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()


class Distilling:
    """A draft in float32 that learns from its target, with products in bfloat16 on a GPU."""

    def __init__(self, setup: Machine) -> None:
        self.setup, self.pair = setup, setup.pair()
        self.draft = self.pair.draft.float().requires_grad_(True).train()
        texts = _random_texts(setup, DISTILL_TEXTS, self.pair.vocab_size)
        half = texts.shape[1] // 2
        self.batch = ResponseBatch.of(texts[:, :half], texts[:, half:], setup.device)
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), lr=1e-5)
        # As in distillation: Lightning keeps no casts, and products in float32 are in TF32.
        self.autocast = torch.autocast(setup.device.type, torch.bfloat16, setup.device.type == "cuda", cache_enabled=False)

    def rows(self) -> Iterator[list]:
        """Yield the timing of steps with the target's distributions computed and stored, activations kept and computed again."""
        torch.set_float32_matmul_precision("high")
        num_tokens, sources = self.batch.tokens.numel(), {"computed": self.computed, "stored": self.stored()}
        for activations in ("kept", "computed again"):
            if activations != "kept":
                self.draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for name, source in sources.items():
                timing = _timing_of(partial(self.step, source), num_tokens, self.setup)
                share = self.operations(name == "computed") / timing[0] / self.setup.limits[1]
                yield [name, activations, *timing, share]
        torch.set_float32_matmul_precision("highest")  # as heads are trained

    def operations(self, reads_target: bool) -> float:
        """Return the operations of a step: two per weight and token forward, four backward; recomputed ones are not counted.

        Output embeddings read response tokens only; attention's products are left out, as are those of look-ups.
        """
        num_tokens, num_responses = self.batch.tokens.numel(), int(self.batch.predicting.sum())
        draft, target = (_products_of(lm, num_tokens, num_responses) for lm in (self.pair.draft_lm, self.pair.target_lm))
        return 6 * draft + (2 * target if reads_target else 0)

    def computed(self) -> DistributionSource:
        """Return the target's distributions, from a forward pass."""
        target = self.pair.target_lm
        with torch.no_grad():
            return computed_distributions(target, self.batch.states(target))

    def stored(self) -> Callable[[], DistributionSource]:
        """Return a function that returns distributions as they are stored on disk, here in memory."""
        target = self.pair.target_lm
        with torch.no_grad():
            states = self.batch.states(target)
            parts = [most_likely(target.logits(piece).log_softmax(dim=-1), STORED) for piece in states.split(64)]
        ids, log_probs = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "log_probs"))
        return lambda: stored_distributions(ids, log_probs)

    def step(self, source: Callable[[], DistributionSource]) -> None:
        """Train the draft on the batch."""
        draft = self.pair.draft_lm
        with self.autocast:
            distributions = source()
            losses, _ = token_losses(draft, self.batch.states(draft), distributions, DIVERGENCE)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _products_of(lm: LanguageModel, num_tokens: int, num_outputs: int) -> float:
    """Return the multiply-adds of a forward pass: matrices of layers times tokens, the output embedding times its outputs."""
    output = lm.output_embedding.weight
    tables = {id(output), id(lm.model.get_input_embeddings().weight)}
    layers = sum(weight.numel() for weight in lm.model.parameters() if weight.ndim == 2 and id(weight) not in tables)
    return layers * num_tokens + output.numel() * num_outputs
