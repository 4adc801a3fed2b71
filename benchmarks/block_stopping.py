"""What can a head gain under block verification, and should it predict acceptances or ratios of probabilities?

    python benchmarks/block_stopping.py --model mini --data search

Drafts of 20 tokens begin at positions of the target's responses to dev prompts, and both models read them. Under block
verification the chance that at least n tokens of a draft are accepted, given the draft up to there, is p_n = min(1, p_{n-1} t /
d) (Sun et al. 2024); under token verification it is the product of min(1, t / d). A rule's expected tokens in a round are one
and the sum of these chances up to where it stops. Thresholds and fixed lengths are chosen on one half of the prompts and
reported on the other. As rounds begin at uniform positions, speed-ups are comparable with each other, not with those of replay.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, smooth_l1_loss

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.head_search import (
    KEPT,
    WARP,
    Network,
    Positions,
    Variant,
    batches,
    labelled_responses,
    labels_of,
    positions_of,
    trained,
)
from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, interval, prompt_record, text_of, write_result
from specheads import Pair, load_pair
from specheads.evaluation.intervals import resample_counts
from specheads.padding import right_padded, slices
from specheads.training.optimizer import cosine_after_warmup

LONGEST, PER_RESPONSE = 20, 8  # tokens of a draft; drafts along a response
LIMIT = 4.0  # of logarithms of ratios; a token that the target rules out has the lowest
RATIOS = (5, 10, 20)
HEAD = Variant(64, responses=4, epochs=6, drafted=4)


@dataclass(frozen=True)
class Drafts:
    """R drafts of LONGEST tokens; tensors (R, LONGEST)."""

    prompt: np.ndarray  # (R,), the number of the prompt
    log_ratio: Tensor  # log t - log d
    acceptance: Tensor  # a head's predictions: of the acceptance,
    predicted_ratio: Tensor  # and of the log ratio

    def half(self, odd: bool) -> "Drafts":
        """Return the drafts of the prompts with even or odd numbers."""
        kept = self.prompt % 2 == odd
        return Drafts(self.prompt[kept], *(each[torch.from_numpy(kept)] for each in (self.log_ratio, *self.predictions)))

    @property
    def predictions(self) -> tuple[Tensor, Tensor]:
        return self.acceptance, self.predicted_ratio


@torch.no_grad()
def drafted(pair: Pair, rows: Sequence[dict], networks: Sequence[Network], seed: int) -> Drafts:
    """Return drafts that begin at random positions of rows of a data set, with what networks predict of their tokens."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    texts, prompt = [], []
    for number, row in enumerate(rows):
        for start in rng.integers(len(row["response_ids"]), size=PER_RESPONSE):
            texts.append(np.array([*row["prompt_ids"], *row["response_ids"][:start]]))
            prompt.append(number)
    parts = []
    for piece in slices(len(texts), 1, 64):
        chosen = texts[piece]
        lengths = torch.tensor([len(text) for text in chosen])
        tokens = torch.cat([right_padded(chosen), torch.zeros(len(chosen), LONGEST, dtype=torch.long)], dim=1)
        row = torch.arange(len(chosen))
        for place in range(LONGEST):
            read = tokens[:, : int(lengths.max()) + place]
            state = pair.draft_lm.hidden_states(read, use_cache=False)[row, lengths + place - 1]
            probs = WARP(pair.draft_lm.logits(state))
            tokens[row, lengths + place] = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        # As rows of a data set whose responses are the drafts.
        made = [
            {"prompt_ids": text.tolist(), "response_ids": tokens[number, len(text) : len(text) + LONGEST].tolist()}
            for number, text in enumerate(chosen)
        ]
        data = positions_of(pair, made)
        which = (data.ids.long() == data.response.long()[:, None]).int().argmax(dim=1, keepdim=True)
        places = torch.arange(len(which))
        starts = torch.repeat_interleave(torch.from_numpy(data.ends[:-1]), LONGEST)
        everything = list(range(len(made)))
        outputs = [network(data, everything, places, starts, which).view(-1, LONGEST) for network in networks]
        ratio = (data.target.float().gather(1, which) / data.draft.float().gather(1, which).clamp_min(1e-9)).log()
        parts.append((ratio.view(-1, LONGEST), *outputs))
    log_ratio, *predictions = (torch.cat(each) for each in zip(*parts, strict=True))
    return Drafts(np.array(prompt), log_ratio, *predictions)


def ratio_network(pair: Pair, data: Positions, seed: int) -> Network:
    """Return a head of the same shape that has learned log t - log d of the draft's tokens, within LIMIT."""
    torch.manual_seed(seed)
    network, rows = Network(HEAD, pair, data), len(data.rounds)
    steps = -(-rows // 16) * HEAD.epochs
    optimizer = torch.optim.AdamW(network.parameters(), lr=HEAD.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_after_warmup(steps, 0.03))
    rng = np.random.default_rng(seed)
    for epoch in range(HEAD.epochs):
        for chosen, places, starts in batches(data, rng.permutation(rows).tolist(), epoch):
            _, weights = labels_of(data, places)
            which = torch.multinomial(weights + 1e-9, HEAD.drafted or KEPT, replacement=True)
            ratio = (data.target[places].float() / data.draft[places].float().clamp_min(1e-9)).log().clamp(-LIMIT, LIMIT)
            loss = smooth_l1_loss(network(data, chosen, places, starts, which), ratio.gather(1, which))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return network.eval()


def token_chance(log_ratio: Tensor) -> Tensor:
    """Return the chance that token verification accepts at least 1, 2, ... tokens, (R, LONGEST)."""
    return log_ratio.clamp_max(0).cumsum(dim=1).exp()


def block_chance(log_ratio: Tensor) -> Tensor:
    """Return the chance that block verification does: a walk that is reflected at 1."""
    chances, before = [], torch.zeros(len(log_ratio))
    for step in log_ratio.T:
        before = (before + step).clamp_max(0)
        chances.append(before)
    return torch.stack(chances, dim=1).exp()


def lengths_at(survival: Tensor, threshold: float) -> Tensor:
    """Return where a draft stops that goes on while its survival is at least `1 - threshold`, (R,)."""
    stops = survival < 1 - threshold
    stops[:, -1] = True
    return stops.int().argmax(dim=1) + 1


def totals(lengths: Tensor, chance: Tensor, prompt: np.ndarray, num_prompts: int) -> np.ndarray:
    """Return by prompt the expected tokens, the rounds and the drafted tokens, (P, 3)."""
    within = torch.arange(LONGEST) < lengths[:, None]
    tokens = 1 + (chance * within).sum(dim=1)
    columns = [tokens.double().numpy(), np.ones(len(prompt)), lengths.double().numpy()]
    return np.stack([np.bincount(prompt, column, num_prompts) for column in columns], axis=1)


def speed(counts: np.ndarray, ratio: float) -> np.ndarray:
    """Return the speed-up over the target alone from counts (..., 3)."""
    return counts[..., 0] / (counts[..., 1] + counts[..., 2] / ratio)


THRESHOLDS = np.linspace(0.02, 0.98, 49)


def rules(drafts: Drafts) -> dict[str, Mapping[float, Tensor]]:
    """Return by rule its lengths (R,) for each of its values."""
    acceptance, ratio = drafts.predictions
    survivals = {
        "a head's acceptances, multiplied": logsigmoid(acceptance).cumsum(dim=1).exp(),
        "a head's ratios, by the walk": block_chance(ratio),
        "true acceptances, multiplied": token_chance(drafts.log_ratio),
        "true ratios, by the walk": block_chance(drafts.log_ratio),
    }
    fixed = {float(length): torch.full((len(drafts.prompt),), length) for length in range(1, LONGEST + 1)}
    return {"fixed length": fixed} | {
        name: {float(t): lengths_at(survival, t) for t in THRESHOLDS} for name, survival in survivals.items()
    }


def table_rows(dev: Drafts, test: Drafts, num_prompts: int) -> list[list[Value]]:
    """Return for each verification and rule its speed-ups and gains over the best fixed length."""
    rows: list[list[Value]] = []
    resamples = resample_counts(num_prompts)
    for verification, chance in (("token", token_chance), ("block", block_chance)):
        chosen = {}
        for name, values in rules(dev).items():
            counts = {
                value: totals(lengths, chance(dev.log_ratio), dev.prompt, num_prompts).sum(axis=0)
                for value, lengths in values.items()
            }
            chosen[name] = [max(values, key=lambda value: speed(counts[value], ratio)) for ratio in RATIOS]
        reported = rules(test)
        speeds = {}
        for name, best in chosen.items():
            for ratio, value in zip(RATIOS, best, strict=True):
                counts = totals(reported[name][value], chance(test.log_ratio), test.prompt, num_prompts)
                speeds[name, ratio] = speed(resamples @ counts, ratio)
        for name in chosen:
            row: list[Value] = [verification, name]
            for ratio in RATIOS:
                ours, fixed = speeds[name, ratio], speeds["fixed length", ratio]
                row += [interval(*_bounds(ours)), interval(*_bounds(ours / fixed - 1))]
            rows.append(row)
    return rows


def _bounds(values: np.ndarray) -> tuple[float, float, float]:
    return float(values[0]), *(float(each) for each in np.quantile(values, [0.025, 0.975]))


COLUMNS = [Column("verification"), Column("rule")]
for at in RATIOS:
    COLUMNS += [Column(f"speed-up at {at}", "ratio:3"), Column(f"gain at {at}", "signed_percent")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--data", type=Path, default=ROOT / "outputs" / "head_search", help="that of head_search.py")
    parser.add_argument("--seed", type=int, default=0)
    add_result_option(parser, "block_stopping")
    given = parser.parse_args()
    pair = load_pair(given.model)
    train, dev = labelled_responses(pair, given.data / given.model, HEAD.responses)
    data = positions_of(pair, train)
    networks = [trained(HEAD, pair, data, len(data.rounds), None, given.seed), ratio_network(pair, data, given.seed)]
    drafts = drafted(pair, dev, networks, given.seed)
    rows = table_rows(drafts.half(False), drafts.half(True), len(dev))
    title = f"Drafts of {given.model}, at uniform positions of responses to {len(dev)} dev prompts, one half chosen on"
    table = Table("rules", title, COLUMNS, rows)
    print(text_of(table))
    prompts = prompt_record(row["prompt_id"] for row in dev)
    write_result(given.result, [table], split="dev", seeds=[given.seed], prompts=prompts)


if __name__ == "__main__":
    main()
