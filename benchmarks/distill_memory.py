"""`python benchmarks/distill_memory.py`: the memory of a loss at a vocabulary of 150,000, in pieces and as a plain formula.

Every row is measured in a separate process: an output embedding in float32, the tokens, the loss and its gradient. *Peak* is
the largest resident memory in excess of that before; the distribution of a single token takes 0.57 MiB in float32.
"""

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, text_of, write_result
from specheads.language_model import LanguageModel
from specheads.training.distill.distill_loss import (
    computed_distributions,
    most_likely,
    stored_distributions,
    target_log_probs,
    token_losses,
)
from specheads.training.distill.settings import DistillLoss

VOCAB, WIDTH = 150_000, 64
FORMS = {"plain": "plain formula", "pieces": "in pieces", "stored": "in pieces, the target's distributions from disk"}
MIB = 2**20


def main() -> None:
    """Print the table, or take one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=3, metavar=("FORM", "LOSS", "TOKENS"))
    add_result_option(parser, "distill_memory")
    given = parser.parse_args()
    if given.one:
        form, loss, tokens = given.one
        print(*measure(form, loss, int(tokens)))
        return
    rows = []
    for form, loss, tokens in (
        ("plain", "forward_kl", 512),
        ("plain", "forward_kl", 1024),
        *(
            ("pieces", loss, tokens)
            for loss in ("forward_kl", "jensen_shannon", "total_variation")
            for tokens in (512, 1024, 4096)
        ),
        ("stored", "total_variation", 4096),
    ):
        done = subprocess.run(
            [sys.executable, __file__, "--one", form, loss, str(tokens)], capture_output=True, text=True, check=True
        )
        peak, seconds = map(float, done.stdout.split())
        rows.append([FORMS[form], loss, tokens, peak, seconds])
    columns = [Column("form"), Column("loss"), Column("tokens"), Column("peak, MiB", "fixed:0"), Column("seconds", "fixed:1")]
    table = Table("peak", f"Vocabulary {VOCAB:,}, hidden size {WIDTH}, float32", columns, rows)
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(given.result, [table])


def measure(form: str, divergence: str, count: int) -> tuple[float, float]:
    """Return the peak in MiB, in excess of the memory before, and the seconds."""
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=8)
    models = [LanguageModel(LlamaForCausalLM(config).requires_grad_(False)) for _ in range(2)]
    target, draft = models
    draft.output_embedding.weight.requires_grad_(True)
    draft.output_embedding.weight.grad = torch.zeros_like(draft.output_embedding.weight)
    states = [torch.randn(count, WIDTH) for _ in models]
    states[1].requires_grad_(True)
    tokens, loss = torch.randint(VOCAB, (count,)), DistillLoss(divergence=divergence)
    stored = None
    if form == "stored":
        parts = [most_likely(target_log_probs(target.logits(piece), loss), 64) for piece in states[0].split(64)]
        stored = stored_distributions(torch.cat([part.ids for part in parts]), torch.cat([part.log_probs for part in parts]))
        del parts
    with Peak() as peak:
        start = time.perf_counter()
        if form == "plain":
            log_target, log_draft = (lm.logits(hidden).log_softmax(-1) for lm, hidden in zip(models, states, strict=True))
            losses = loss.function(log_target, log_draft)
        else:
            distributions = stored or computed_distributions(target, states[0], loss)
            losses, _ = token_losses(draft, states[1], distributions, tokens, loss)
        losses.mean().backward()
        seconds = time.perf_counter() - start
    return peak.mib, seconds


class Peak:
    """The largest resident memory while the block runs, in excess of that at its beginning."""

    def __enter__(self) -> Self:
        self.before = self.largest = resident()
        self.running = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while self.running:
            self.largest = max(self.largest, resident())
            time.sleep(0.005)

    def __exit__(self, *error: object) -> None:
        self.running = False
        self.thread.join()
        self.mib = (self.largest - self.before) / MIB


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
