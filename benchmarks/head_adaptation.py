"""Do heads get better by learning from a request's rounds while it is decoded, and how much should they trust what they know?

    python benchmarks/head_adaptation.py --model mini --data search

A head of head_search.py predicts the draft's tokens along the target's responses to dev prompts. Some of its numbers move with
the outcomes of earlier rounds of the same response, by online Newton steps from a Gaussian prior around what training left
(Hazan et al. 2007): its bias; its bias and scale; these and the weight of the draft's largest probability, as in `online_head`;
or its whole last layer. The prior's precision is the best on train prompts, so it is one that all requests share.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.head_search import Network, Positions, Variant, batches, labelled_responses, labels_of, positions_of, trained
from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import load_pair
from specheads.decoding.stopping import logistic_inputs
from specheads.heads.metrics import auroc

HEAD = Variant(20, responses=4, epochs=6, drafted=4)
PRECISIONS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
NUM_TRAIN = 200  # responses to train prompts that a precision is chosen on

Inputs = Callable[["Tokens"], Tensor]


class Tokens:
    """One drafted token at each position of responses: tensors (R, T, ...), NaN or zero after the end of a response."""

    def __init__(self, network: Network, data: Positions, rows: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.from_numpy(np.diff(data.ends)[rows])
        self.there = torch.arange(int(lengths.max())) < lengths[:, None]
        parts: dict[str, list[Tensor]] = {name: [] for name in ("logit", "last", "confidence", "label", "start")}
        with torch.no_grad():
            for chosen, places, starts in batches(data, rows, 0):
                labels, weights = labels_of(data, places)
                which = torch.multinomial(weights + 1e-9, 1, generator=generator)
                last: list[Tensor] = []
                hook = network.readout.register_forward_pre_hook(lambda _, given, kept=last: kept.append(given[0]))
                logit = network(data, chosen, places, starts, which).squeeze(1)
                hook.remove()
                first = torch.from_numpy(np.repeat(data.ends[chosen], np.diff(data.ends)[chosen]))
                values = (
                    logit,
                    last[0].squeeze(1),
                    logistic_inputs(("logit_max_prob",), {"max_prob": data.max_prob[places]}).squeeze(1),
                    labels.gather(1, which).squeeze(1),
                    starts - first,
                )
                for kept, value in zip(parts.values(), values, strict=True):
                    kept.append(value.double() if value.is_floating_point() else value)
        columns = [self._padded(torch.cat(each)) for each in parts.values()]
        self.logit, self.last, self.confidence, self.label, self.start = columns
        self.outcome = (torch.rand(self.label.shape, generator=generator, dtype=torch.float64) < self.label).double()

    def _padded(self, values: Tensor) -> Tensor:
        padded = torch.zeros(*self.there.shape, *values.shape[1:], dtype=values.dtype)
        padded[self.there] = values
        return padded


# By name what moves: the inputs whose weights are 0 before the first round, on top of the head's logit.
MOVING: dict[str, Inputs] = {
    "its bias": lambda tokens: torch.ones_like(tokens.logit)[..., None],
    "its bias and scale": lambda tokens: torch.stack([torch.ones_like(tokens.logit), tokens.logit], dim=-1),
    "and the weight of the largest probability": lambda tokens: torch.stack(
        [torch.ones_like(tokens.logit), tokens.logit, tokens.confidence], dim=-1
    ),
    "its last layer": lambda tokens: torch.cat([torch.ones_like(tokens.logit)[..., None], tokens.last], dim=-1),
}


def adapted(tokens: Tokens, inputs: Tensor, precision: float) -> Tensor:
    """Return logits (R, T) that know the outcomes of earlier rounds; `inputs` (R, T, n)."""
    rows, length, size = inputs.shape
    weights = torch.zeros(rows, length + 1, size, dtype=torch.float64)  # before each position
    information = precision * torch.eye(size, dtype=torch.float64).repeat(rows, 1, 1)
    for place in range(length):
        here = tokens.there[:, place].double()
        x, now = inputs[:, place], weights[:, place]
        # The step of an outcome is taken from the weights at that time, but predictions use them only in the next round.
        chance = (tokens.logit[:, place] + (now * x).sum(dim=1)).sigmoid()
        information = information + (here * chance * (1 - chance))[:, None, None] * x[:, :, None] * x[:, None, :]
        gradient = (here * (tokens.outcome[:, place] - chance))[:, None] * x
        weights[:, place + 1] = now + torch.linalg.solve(information, gradient)
    known = weights.gather(1, tokens.start[..., None].expand(-1, -1, size))
    return tokens.logit + (known * inputs).sum(dim=-1)


def measures(tokens: Tokens, logits: Tensor) -> tuple[float, float]:
    """Return the AUROC and the mean cross-entropy in nats."""
    logit, label = logits[tokens.there], tokens.label[tokens.there]
    losses = label * softplus(-logit) + (1 - label) * softplus(logit)
    return auroc(logit, label), losses.mean().item()


COLUMNS = [
    *(Column("what moves"), Column("precision of the prior", "fixed:0"), Column("AUROC", "fixed:4")),
    Column("cross-entropy", "fixed:4"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--data", type=Path, default=ROOT / "outputs" / "head_search", help="that of head_search.py")
    parser.add_argument("--seed", type=int, default=0)
    add_result_option(parser, "head_adaptation")
    given = parser.parse_args()
    pair = load_pair(given.model)
    train, dev = labelled_responses(pair, given.data / given.model, HEAD.responses)
    data, held_out = positions_of(pair, train), positions_of(pair, dev)
    network = trained(HEAD, pair, data, len(train), None, given.seed)
    chosen_on = Tokens(network, data, range(NUM_TRAIN), given.seed)
    reported = Tokens(network, held_out, range(len(dev)), given.seed + 1)
    rows: list[list[Value]] = [["nothing", None, *measures(reported, reported.logit)]]
    for name, inputs in MOVING.items():
        losses = {each: measures(chosen_on, adapted(chosen_on, inputs(chosen_on), each))[1] for each in PRECISIONS}
        best = min(PRECISIONS, key=losses.__getitem__)
        rows.append([name, best, *measures(reported, adapted(reported, inputs(reported), best))])
    table = Table("adapted", f"A head of width {HEAD.width} for {given.model}'s draft, on dev prompts", COLUMNS, rows)
    print(text_of(table))
    prompts = prompt_record(row["prompt_id"] for row in dev)
    write_result(given.result, [table], split="dev", seeds=[given.seed], prompts=prompts)


if __name__ == "__main__":
    main()
