"""What prunes a token tree best: the draft's probabilities, or a head that has learned from siblings?

    python benchmarks/tree_pruning.py --model mini --data search [--greedy]

Trees of the draft's four most likely tokens are verified by matching, so the chance that a node is accepted after its parent is
the target's probability of its token. A head for chains learns min(1, t/d) of tokens that the draft samples; here heads learn the
target's probability of each of the four (greedily: whether it is the target's token). A node whose path is less likely than a
bound gets no children; it stays in the tree as a leaf, or it is dropped (its siblings of a larger chance stay). Heads learn from
responses to train prompts. Dev prompts are decoded at every bound, and tokens per round are read off at equal numbers of nodes.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.head_search import WARP, Positions, labelled_responses, labels_of, positions_of
from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, interval, prompt_record, text_of, write_result
from specheads import Pair, SpeculativeDecoder, Warp, drafting, load_pair, stopping, verification
from specheads.decoding.drafting.token_tree import TopDrafter
from specheads.decoding.drafting.tree_growth import Nodes, Proposal
from specheads.evaluation.intervals import resample_counts
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead
from specheads.training.optimizer import cosine_after_warmup

SIBLINGS, DEPTH, MAX_TOKENS = 4, 10, 64
NUM_NODES = (4, 8, 16, 32)  # per round, at which rules are compared
BOUNDS = (0.5, 0.25, 0.12, 0.05, 0.02, 0.01)  # of a path's probability
BY_PATH = "the path's probability (EAGLE-2)"
PROBABILITIES = ("draft_prob", "max_prob", "entropy")


class OnlySurvivors(TopDrafter):
    """Drops what it prunes; of the first level the most likely token stays."""

    def admit(self, nodes: Nodes, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        largest: dict[int, float] = {}
        for proposal in proposals:
            largest[proposal.parent] = max(largest.get(proposal.parent, 0.0), proposal.prob)
        choices = self.choices
        survivors = [
            proposal
            for proposal in proposals
            if not proposal.stop and proposal.prob >= max(choices.theta_prob, choices.theta_sib * largest[proposal.parent])
        ]
        if not len(nodes) and not survivors:
            survivors = [max(proposals, key=lambda proposal: proposal.prob)]
        return super().admit(nodes, survivors)


class SurvivorTree(drafting.Tree):
    """A tree without the nodes that it prunes."""

    def make_drafter(self, engine, warp, rule):  # type: ignore[no-untyped-def]
        return OnlySurvivors(self, engine, warp, rule)


@dataclass(frozen=True)
class Lesson:
    """What a head learns from."""

    name: str
    siblings: bool  # from the most likely tokens and the target's probability of them; or from sampled ones and min(1, t/d)
    inputs: tuple[str, ...] = ()  # () are those of a head by default


LESSONS = (
    Lesson("a head for chains", siblings=False),
    Lesson("a head taught by siblings", siblings=True),
    Lesson("the same without the draft's state", siblings=True, inputs=PROBABILITIES),
)


def features_of(pair: Pair, data: Positions, places: Tensor, which: Tensor) -> dict[str, Tensor]:
    """Return a head's features of the tokens `which` (n, k) at positions `places` (n,)."""
    ids = data.ids[places].long().gather(1, which)
    of_position = {"hidden": data.hidden[places].float(), "max_prob": data.max_prob[places], "entropy": data.entropy[places]}
    wide = {name: value[:, None].expand(-1, which.shape[1], *value.shape[1:]) for name, value in of_position.items()}
    with torch.no_grad():
        embedding = pair.draft_lm.embed(ids).float()
    return wide | {"embedding": embedding, "draft_prob": data.log_prob[places].float().gather(1, which).exp()}


def lesson_of(lesson: Lesson, data: Positions, places: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens (n, k) to learn from, as numbers of kept ones, and their labels (n, k)."""
    acceptance, draft = labels_of(data, places)
    said = (data.ids[places] == data.response[places][:, None]).float()
    if lesson.siblings:
        which = torch.arange(SIBLINGS).expand(len(places), -1)
        labels = said if greedy else data.target[places].float()
    elif greedy:
        which, labels = torch.zeros(len(places), 1, dtype=torch.long), said
    else:
        which, labels = torch.multinomial(draft + 1e-9, SIBLINGS, replacement=True), acceptance
    return which, labels.gather(1, which).clamp(0, 1)


def taught(lesson: Lesson, pair: Pair, data: Positions, greedy: bool, epochs: int, seed: int) -> AcceptanceHead:
    """Return a head that has learned a lesson from all positions."""
    torch.manual_seed(seed)
    lm = pair.draft_lm
    width = pair.draft.get_input_embeddings().weight.shape[1]
    head = AcceptanceHead(HeadConfig(lm.hidden_size, inputs=lesson.inputs, embedding_size=width))
    number, size = len(data.hidden), 2048
    sample = torch.randint(number, (20_000,))
    head.standardise(head.assemble(features_of(pair, data, sample, torch.zeros(len(sample), 1, dtype=torch.long)))[:, 0])
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_after_warmup(epochs * -(-number // size), 0.03))
    for _ in range(epochs):
        for places in torch.randperm(number).split(size):
            which, labels = lesson_of(lesson, data, places, greedy)
            loss = binary_cross_entropy_with_logits(head(features_of(pair, data, places, which)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    return head.requires_grad_(False).eval()


def makers(heads: Mapping[str, AcceptanceHead]) -> dict[tuple[str, str], list[tuple[drafting.Tree, stopping.StoppingRule]]]:
    """Return trees and the rules that prune them, for each bound; by what prunes and what becomes of pruned nodes."""
    made: dict[tuple[str, str], list[tuple[drafting.Tree, stopping.StoppingRule]]] = {}
    wide = {"top_k": SIBLINGS, "max_nodes": 64, "max_width": 16}
    for kept, kind in (("leaves", drafting.Tree), ("dropped", SurvivorTree)):
        made["each token's probability (TSD)", kept] = [
            (kind(theta_prob=bound, theta_sib=0.3, **wide), stopping.FixedLength(DEPTH)) for bound in BOUNDS
        ]
        free = kind(theta_prob=0.0, theta_sib=0.0, **wide)
        if kept == "dropped":
            made[BY_PATH, kept] = [(free, stopping.DraftProduct(1 - bound, max_tokens=DEPTH)) for bound in BOUNDS]
        for name, head in heads.items():
            if kept == "leaves" and name != LESSONS[1].name:
                continue  # to see what dropping is worth, two rules are enough
            made[name, kept] = [(free, stopping.HeadThreshold(head, 1 - bound, 1, DEPTH)) for bound in BOUNDS]
    return made


def decoded(
    pair: Pair, tree: drafting.Tree, rule: stopping.StoppingRule, warp: Warp, prompts: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return by prompt the tokens, the rounds and the nodes of a decoder, (P, 3)."""
    decoder = SpeculativeDecoder(pair, tree, rule, verification.TreeMatch(), warp, "eager")
    stats = [decoder.generate(prompt, MAX_TOKENS, seed=number).stats for number, prompt in enumerate(prompts)]
    return np.array([[each.num_tokens, each.num_target_calls, each.num_drafted] for each in stats], dtype=float)


def at_nodes(counts: np.ndarray, resamples: np.ndarray) -> np.ndarray:
    """Return tokens per round at NUM_NODES by resample (resamples, nodes), from counts (bounds, P, 3); NaN out of reach.

    Between two bounds it is taken as linear in the logarithm of the nodes.
    """
    sums = np.einsum("rp,bpc->rbc", resamples, counts)
    nodes, tokens = np.log(sums[..., 2] / sums[..., 1]), sums[..., 0] / sums[..., 1]
    wanted = np.log(NUM_NODES)
    rows = []
    for x, y in zip(nodes, tokens, strict=True):
        order = np.argsort(x)
        rows.append(np.interp(wanted, x[order], y[order], left=np.nan, right=np.nan))
    return np.array(rows)


def bounds_of(values: np.ndarray) -> Value:
    """Return the first value with the interval of the others; None if a number of nodes is out of reach."""
    if np.isnan(values).any():
        return None
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return interval(float(values[0]), float(low), float(high))


COLUMNS = [Column("pruned by"), Column("pruned nodes")]
for nodes_at in NUM_NODES:
    COLUMNS += [Column(f"tokens per round, {nodes_at} nodes", "plus_minus"), Column(f"gain at {nodes_at}", "signed_percent")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--data", type=Path, default=ROOT / "outputs" / "head_search", help="where data sets are kept")
    parser.add_argument("--greedy", action="store_true", help="decode greedily")
    parser.add_argument("--responses", type=int, default=4, help="to each train prompt; greedily there is one")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=24, help="dev prompts that are decoded")
    parser.add_argument("--seed", type=int, default=0)
    add_result_option(parser, "tree_pruning")
    given = parser.parse_args()
    pair, warp = load_pair(given.model), Warp(0) if given.greedy else WARP
    train, dev = labelled_responses(pair, given.data / given.model, 1 if given.greedy else given.responses, warp)
    data = positions_of(pair, train)
    heads = {lesson.name: taught(lesson, pair, data, given.greedy, given.epochs, given.seed) for lesson in LESSONS}
    dev = dev[: given.prompts]
    prompts, resamples = [row["prompt_ids"] for row in dev], resample_counts(len(dev))
    reached: dict[tuple[str, str], np.ndarray] = {}
    for name, choices in makers(heads).items():
        counts = np.stack([decoded(pair, tree, rule, warp, prompts) for tree, rule in choices])
        reached[name] = at_nodes(counts, resamples)
        print(*name, reached[name][0].round(3), flush=True)
    rows: list[list[Value]] = []
    for name, tokens in reached.items():
        compared = reached[BY_PATH, "dropped"]
        cells = [(bounds_of(tokens[:, at]), bounds_of(tokens[:, at] / compared[:, at] - 1)) for at in range(len(NUM_NODES))]
        rows.append([*name, *(cell for pair_of_cells in cells for cell in pair_of_cells)])
    title = (
        f"Trees of {given.model}'s draft, {'greedy' if given.greedy else 'sampled'}, on dev prompts; the gain is over the path's "
    )
    tables = [
        Table("greedy" if given.greedy else "sampled", f"{title}probability with the same fate of pruned nodes", COLUMNS, rows)
    ]
    print(text_of(tables[0]))
    write_result(given.result, tables, split="dev", seeds=[given.seed], prompts=prompt_record(row["prompt_id"] for row in dev))


if __name__ == "__main__":
    main()
