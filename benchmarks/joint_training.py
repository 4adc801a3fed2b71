"""Does a draft that learns its own acceptance as a second objective let heads decide better, and what does its overlap lose?

    python benchmarks/joint_training.py --model mini [--variants "distilled" ...]

A copy of the pair's draft learns on the target's responses to train prompts: from the distance of its distribution from the
target's (total variation), from the loss of an acceptance head on its states, or from their weighted sum. Then it is frozen and
new heads are trained on its states, as benchmarks/head_search.py trains them, and measured on the responses to dev prompts.
Copies are kept as folders for `model.draft=` of train.py and evaluate.py.
"""

import argparse
import copy
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.head_search import WARP, Positions, Variant, labelled_responses, labels_of, measured, positions_of, trained
from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import Pair, load_pair
from specheads.language_model import LanguageModel
from specheads.padding import right_padded, slices
from specheads.training.distill.divergences import total_variation
from specheads.training.optimizer import DraftOptimizer, cosine_after_warmup

RESPONSES, ROWS = 4, 16  # to each train prompt; of a step
DRAFTED = 4  # tokens at each position that the acceptance is learned from
HEADS = {"narrow": Variant(20, responses=RESPONSES, epochs=6), "wide": Variant(256, responses=RESPONSES, epochs=6, lr=1e-3)}


@dataclass(frozen=True)
class Objective:
    """What a copy of the draft learns: the sum of these losses, each times its weight.

    Without the first the copy does not draft: it is a second model of the draft's size that judges the draft's tokens.
    """

    distance: float = 0.0  # the total variation between the copy's distribution and the target's
    acceptance: float = 0.0  # the cross-entropy of the acceptance of the copy's own tokens


OBJECTIVES = {
    "the draft as it is": None,
    "a copy beside it that only judges": Objective(acceptance=1.0),
    "distilled": Objective(distance=1.0),
    "distilled, acceptance at weight 0.1": Objective(1.0, 0.1),
    "distilled, acceptance at weight 0.3": Objective(1.0, 0.3),
    "distilled, acceptance at weight 1": Objective(1.0, 1.0),
}


class AuxiliaryHead(nn.Module):
    """An acceptance head of width 64 on a state that is still learning; the draft's probabilities enter without gradients."""

    def __init__(self, hidden_size: int, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size)
        self.of_state, self.of_token = nn.Linear(hidden_size, width), nn.Linear(hidden_size, width, bias=False)
        self.of_numbers = nn.Linear(3, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.readout = nn.Linear(width, 1)

    def forward(self, state: Tensor, embedding: Tensor, numbers: Tensor) -> Tensor:
        """Return logits (n, k) for states (n, H), the embeddings (n, k, H) of tokens, and three numbers of each, (n, k, 3)."""
        x = self.of_state(self.norm(state))[:, None] + self.of_token(self.norm(embedding)) + self.of_numbers(numbers)
        for block in self.blocks:
            x = x + nn.functional.silu(block(x))
        return self.readout(x).squeeze(-1)


def acceptance_loss(head: AuxiliaryHead, lm: LanguageModel, state: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the acceptance of tokens drawn from the draft; the target's logits are (n, V)."""
    with torch.no_grad():
        draft = WARP(logits)
        which = torch.multinomial(draft, DRAFTED, replacement=True)
        plain = logits.log_softmax(dim=-1)
        shared = torch.stack([plain.amax(dim=-1).exp(), -(plain.exp() * plain).sum(dim=-1)], dim=1)
        numbers = torch.cat([plain.gather(1, which)[..., None] / 2, shared[:, None].expand(-1, DRAFTED, -1)], dim=-1)
        labels = (WARP(target).gather(1, which) / draft.gather(1, which)).clamp_max(1.0)
        embedding = lm.embed(which)
    return nn.functional.binary_cross_entropy_with_logits(head(state, embedding, numbers), labels)


def learned(pair: Pair, objective: Objective, rows: list[dict], data: Positions, epochs: int, seed: int) -> Pair:
    """Return the pair with a copy of its draft that has learned from rows, whose target states `data` has."""
    torch.manual_seed(seed)
    model = copy.deepcopy(pair.draft).requires_grad_(True)
    lm = LanguageModel(model, pair.draft_lm.vocab_size, pair.draft_lm.temperature)
    head = AuxiliaryHead(lm.hidden_size)
    settings = DraftOptimizer(name="muon").for_width(lm.hidden_size)
    optimizers = [settings.optimizer_of(model), torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.01)]
    shares = cosine_after_warmup(math.ceil(len(rows) / ROWS) * epochs, settings.warmup_share)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, shares) for optimizer in optimizers]
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(rows))
        for piece in slices(len(rows), 1, ROWS):
            chosen = order[piece].tolist()
            state, places = states_of(lm, [rows[row] for row in chosen], [data.ends[row] for row in chosen])
            logits = lm.logits(state)
            with torch.no_grad():
                target = pair.target_lm.logits(data.target_hidden[places].float())
            loss = torch.zeros(())
            if objective.distance:
                loss = loss + objective.distance * total_variation(target.log_softmax(-1), logits.log_softmax(-1)).mean()
            if objective.acceptance:
                # The loss may move the states, but not the probabilities of the draft that it is a function of.
                drafting = logits.detach() if objective.distance else pair.draft_lm.logits(data.hidden[places].float())
                loss = loss + objective.acceptance * acceptance_loss(head, lm, state, drafting, target)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
    return replace(pair, draft=model.requires_grad_(False))


def states_of(lm: LanguageModel, rows: list[dict], begins: list[int]) -> tuple[Tensor, Tensor]:
    """Return the states (n, H) that responses' tokens are drafted from, and their positions (n,) in the data."""
    tokens = right_padded([np.array([*row["prompt_ids"], *row["response_ids"]]) for row in rows])
    lengths = [len(row["response_ids"]) for row in rows]
    row = torch.repeat_interleave(torch.tensor(lengths))
    index = torch.cat([len(each["prompt_ids"]) - 1 + torch.arange(n) for each, n in zip(rows, lengths, strict=True)])
    places = torch.cat([begin + torch.arange(n) for begin, n in zip(begins, lengths, strict=True)])
    return lm.hidden_states(tokens, use_cache=False)[row, index], places


def figures(pair: Pair, data: Positions, dev: Positions, seed: int) -> list[Value]:
    """Return the draft's overlap on dev prompts, and how heads on its states rank and predict the acceptance there."""
    labels, weights = labels_of(dev, torch.arange(int(dev.ends[-1])))
    overlap = (labels * weights).sum() / weights.sum()
    values: list[Value] = [overlap.item()]
    for variant in HEADS.values():
        network = trained(variant, pair, data, len(data.rounds), None, seed)
        auroc, *_, divergence = measured(network, dev)
        values += [auroc, divergence]
    return values


COLUMNS = [
    *(Column("the draft"), Column("minutes", "fixed:1"), Column("overlap", "fixed:4")),
    *(Column("AUROC, width 20", "fixed:4"), Column("KL, width 20", "fixed:4")),
    *(Column("AUROC, width 256", "fixed:4"), Column("KL, width 256", "fixed:4")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--data", type=Path, default=ROOT / "outputs" / "head_search", help="that of head_search.py")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "joint_training", help="where drafts are kept")
    parser.add_argument("--variants", nargs="*", default=list(OBJECTIVES), choices=list(OBJECTIVES), metavar="VARIANT")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_result_option(parser, "joint_training")
    given = parser.parse_args()
    pair = load_pair(given.model)
    train, dev = labelled_responses(pair, given.data / given.model, RESPONSES)
    data, held_out = positions_of(pair, train), positions_of(pair, dev)
    table_rows: list[list[Value]] = []
    for name in given.variants:
        objective, start, changed = OBJECTIVES[name], time.perf_counter(), pair
        if objective is not None:
            changed = learned(pair, objective, train, data, given.epochs, given.seed)
        minutes = (time.perf_counter() - start) / 60
        read = [positions_of(changed, rows, of.target_hidden) for rows, of in ((train, data), (dev, held_out))]
        if objective is not None and not objective.distance:
            read = [replace(of, hidden=copied.hidden) for of, copied in zip((data, held_out), read, strict=True)]
        table_rows.append([name, minutes, *figures(changed, *read, given.seed)])
        print(text_of(Table("drafts", "", COLUMNS, table_rows[-1:])), flush=True)
        kept = given.out / f"{given.model}-{''.join(each if each.isalnum() else '-' for each in name)}-{given.seed}"
        changed.draft.save_pretrained(kept)
        changed.tokenizer.save_pretrained(kept)
    table = Table(
        "drafts", f"Copies of {given.model}'s draft, {given.epochs} epochs, and heads on their states", COLUMNS, table_rows
    )
    prompts = prompt_record(row["prompt_id"] for row in dev)
    write_result(given.result, [table], split="dev", seeds=[given.seed], prompts=prompts)


if __name__ == "__main__":
    main()
