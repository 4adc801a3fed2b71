"""What could make a head better, if its cost did not matter? More text, inputs, labels, memory and width than `train.py` offers.

    python benchmarks/head_search.py --model mini [--variants "4 responses" ...]

Each variant is a network on the draft's states, trained on the positions of the target's responses to train prompts. It is
measured on the responses to dev prompts: how well it ranks accepted above rejected tokens (AUROC), and its Kullback-Leibler
divergence from the acceptance probabilities, over all tokens that the draft may sample at a position, weighted by their
probabilities; with one response as the text, no sampling is in either. Rounds begin where decoding could have begun them. What
helps here is worth building into heads; what does not is a row of the table.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, silu, softplus

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from data_gen.run import generate_data
from data_gen.settings import Generation
from specheads import Pair, Warp, load_pair
from specheads.heads.metrics import auroc
from specheads.padding import right_padded, slices
from specheads.prompts.nano_source import NanoSource
from specheads.storage.data_set import load_split
from specheads.training.heads.mixed_responses import round_starts
from specheads.training.optimizer import cosine_after_warmup

WARP, KEPT = Warp(temperature=1.0, top_k=50), 50  # tokens of a position that have a probability
ROWS = 16  # responses of a step
TOP = 8  # of the draft's most likely tokens, whose probabilities are inputs


@dataclass(frozen=True)
class Variant:
    """A network and how it is trained."""

    width: int = 20
    depth: int = 3
    responses: int = 1  # to each train prompt
    epochs: int = 12
    drafted: int | None = 1  # tokens at each position that a step learns from; None: all, weighted by their probabilities
    inputs: tuple[str, ...] = ()  # besides those of a head: target, memory, earlier, top, product
    dropped: float = 0.0  # share of the target's numbers, and of the blocks', that a step leaves out
    teacher: str | None = None  # the variant whose predictions are the labels
    lr: float = 3e-3


WIDE = Variant(256, responses=4, epochs=6, lr=1e-3)
TARGET = replace(WIDE, inputs=("target",), dropped=0.1)
STUDENT = Variant(responses=4, epochs=6, drafted=4)
VARIANTS = {
    "a head as it is": Variant(),
    "all tokens' labels": Variant(drafted=None),
    "4 responses": Variant(responses=4, epochs=6),
    "4 responses, width 64": Variant(64, responses=4, epochs=6),
    "4 responses, width 256": WIDE,
    "4 responses, width 256, 8 tokens' labels": replace(WIDE, epochs=3, drafted=8),
    "4 responses, width 256, 8 probabilities": replace(WIDE, inputs=("top",)),
    "4 responses, width 256, products with the token": replace(WIDE, inputs=("product",)),
    "4 responses, width 256, two earlier states": replace(WIDE, inputs=("earlier",)),
    "4 responses, width 64, the target's state": replace(TARGET, width=64, lr=3e-3),
    "4 responses, width 256, the target's state": TARGET,
    "4 responses, width 256, the target's states by a GRU": replace(TARGET, inputs=("target", "memory")),
    "taught by the one of width 256": replace(STUDENT, teacher="4 responses, width 256"),
    "taught by the one with the target's state": replace(STUDENT, teacher="4 responses, width 256, the target's state"),
}


@dataclass(frozen=True)
class Positions:
    """All response positions of a split, one after another: N positions, of R responses."""

    ends: np.ndarray  # (R + 1,), where responses begin and end
    hidden: Tensor  # (N, H), the draft's state that the token was sampled from
    target_hidden: Tensor  # (N, G), the target's
    ids: Tensor  # (N, K), the tokens that the draft may sample, the most likely first
    draft: Tensor  # (N, K), their probabilities
    target: Tensor  # (N, K), those of the target
    log_prob: Tensor  # (N, K), their logarithms under the draft's plain softmax
    max_prob: Tensor  # (N,)
    entropy: Tensor  # (N,)
    response: Tensor  # (N,), the target's token
    rounds: list[dict[str, np.ndarray]]  # of each response, what `round_starts` reads

    def starts(self, rows: Sequence[int], epoch: int) -> Tensor:
        """Return for each position of some responses where its round began, as numbers of positions."""
        parts = [self.ends[row] + round_starts(self.rounds[row], np.random.default_rng([epoch, row])) for row in rows]
        return torch.from_numpy(np.concatenate(parts))


@torch.no_grad()
def positions_of(pair: Pair, rows: Sequence[dict], target_hidden: Tensor | None = None) -> Positions:
    """Return the positions of rows of a data set, with the target's states if they are known; 32 texts are read at a time."""
    parts: list[tuple[Tensor, ...]] = []
    ends = np.cumsum([0, *(len(row["response_ids"]) for row in rows)])
    for piece in slices(len(rows), 1, 32):
        chosen = rows[piece]
        tokens = right_padded([np.array([*row["prompt_ids"], *row["response_ids"]]) for row in chosen])
        row = torch.cat([torch.full((len(each["response_ids"]),), number) for number, each in enumerate(chosen)])
        index = torch.cat([len(each["prompt_ids"]) + torch.arange(len(each["response_ids"])) for each in chosen])
        states = [pair.draft_lm.hidden_states(tokens, use_cache=False)[row, index - 1]]
        if target_hidden is None:
            states.append(pair.target_lm.hidden_states(tokens, use_cache=False)[row, index - 1])
        else:
            states.append(target_hidden[ends[piece.start] : ends[piece.start + len(chosen)]].float())
        for part in slices(len(row), 1, 2048):
            logits = pair.draft_lm.logits(states[0][part])
            target, all_of_draft = WARP(pair.target_lm.logits(states[1][part])), WARP(logits)
            draft, ids = all_of_draft.topk(KEPT)
            plain = logits.log_softmax(dim=-1)
            entropy = -(plain.exp() * plain).sum(dim=-1)
            rest = target.gather(1, ids).half(), plain.gather(1, ids).half(), plain.amax(dim=-1).exp(), entropy
            kept = [state[part].half() for state in states]
            said = tokens[row[part], index[part]]
            chances = [each.gather(1, said[:, None]).squeeze(1).log() for each in (all_of_draft, target)]
            parts.append((*kept, ids.short(), draft.half(), *rest, said.short(), *chances))
    *columns, of_draft, of_target = (torch.cat(each) for each in zip(*parts, strict=True))
    names = ("response_draft_logprob", "response_target_logprob", "response_ids")
    of_row = [slice(*bounds) for bounds in itertools.pairwise(ends)]
    rounds = [
        dict(zip(names, (each[part].numpy() for each in (of_draft, of_target, columns[-1])), strict=True)) for part in of_row
    ]
    return Positions(ends, *columns, rounds)


class Network(nn.Module):
    """A head's network with more inputs; the state enters it once for all tokens of a position."""

    def __init__(self, variant: Variant, pair: Pair, example: Positions) -> None:
        super().__init__()
        self.variant, width = variant, variant.width
        hidden, target = example.hidden[:20_000].float(), example.target_hidden[:20_000].float()
        embedding = pair.draft.get_input_embeddings().weight.detach().float()
        self.scales = {name: (each.mean(dim=0), each.std(dim=0)) for name, each in (("hidden", hidden), ("target", target))}
        self.embedding = (embedding - embedding.mean(dim=0)) / embedding.std(dim=0)
        self.of_state, self.of_token = nn.Linear(hidden.shape[1], width), nn.Linear(embedding.shape[1], width, bias=False)
        self.of_numbers = nn.Linear(4 + (TOP if "top" in variant.inputs else 0), width, bias=False)
        self.of_target = nn.Linear(target.shape[1], width, bias=False) if "target" in variant.inputs else None
        self.of_earlier = nn.Linear(2 * hidden.shape[1], width, bias=False) if "earlier" in variant.inputs else None
        self.products = nn.ModuleList()
        if "product" in variant.inputs:
            self.products.extend([nn.Linear(hidden.shape[1], 64), nn.Linear(embedding.shape[1], 64)])
            self.of_products = nn.Linear(64, width, bias=False)
        self.memory, self.of_memory = None, None
        if "memory" in variant.inputs:
            self.memory = nn.GRU(target.shape[1] + embedding.shape[1], 128, batch_first=True)
            self.of_memory = nn.Linear(128, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(variant.depth))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.readout = nn.Linear(width, 1)

    def forward(self, data: Positions, rows: Sequence[int], places: Tensor, starts: Tensor, which: Tensor) -> Tensor:
        """Return logits (n, k).

        Args:
            places: (n,), the positions of these responses.
            starts: (n,), where their rounds began.
            which: (n, k), the tokens to predict, of those that are kept.
        """
        state = self._scaled("hidden", data.hidden[places])
        ids = data.ids[places].long().gather(1, which)
        # Of all tokens of the vocabulary at once, which are fewer than those of a step.
        x = self.of_state(state)[:, None] + self.of_token(self.embedding)[ids]
        x = x + self.of_numbers(self._numbers(data, places, starts, which))
        if self.of_target is not None:
            x = x + self.of_target(self._target(data, rows, starts))[:, None]
        if self.of_earlier is not None:
            first = torch.from_numpy(np.repeat(data.ends[rows], np.diff(data.ends)[rows]))
            earlier = [
                self._scaled("hidden", data.hidden[(places - back).clamp_min(0)]) * (places - back >= first)[:, None]
                for back in (1, 2)
            ]
            x = x + self.of_earlier(torch.cat(earlier, dim=1))[:, None]
        if len(self.products):
            left, right = self.products
            x = x + self.of_products(left(state)[:, None] * right(self.embedding)[ids])
        if self.of_memory is not None:
            x = x + self.of_memory(self._remembered(data, rows, starts))[:, None]
        for block in self.blocks:
            x = x + dropout(silu(block(x)), self.variant.dropped, self.training)
        return self.readout(x).squeeze(-1)

    def _scaled(self, name: str, values: Tensor) -> Tensor:
        mean, spread = self.scales[name]
        return (values.float() - mean) / spread

    def _numbers(self, data: Positions, places: Tensor, starts: Tensor, which: Tensor) -> Tensor:
        log_prob = data.log_prob[places].float()
        of_position = [data.max_prob[places], data.entropy[places], (places - starts).float().log1p()]
        if "top" in self.variant.inputs:
            of_position += list(log_prob[:, :TOP].clamp_min(-12).T / 4)
        shared = torch.stack(of_position, dim=1)[:, None].expand(-1, which.shape[1], -1)
        return torch.cat([log_prob.gather(1, which)[..., None] / 2, shared], dim=-1)

    def _target(self, data: Positions, rows: Sequence[int], starts: Tensor) -> Tensor:
        """Return the states (n, G) that the last tokens before the rounds were decided from; zeros before a response."""
        first = torch.from_numpy(np.repeat(data.ends[rows], np.diff(data.ends)[rows]))
        states = self._scaled("target", data.target_hidden[(starts - 1).clamp_min(0)])
        return dropout(states, self.variant.dropped, self.training) * (starts > first)[:, None]

    def _remembered(self, data: Positions, rows: Sequence[int], starts: Tensor) -> Tensor:
        """Return what the recurrence knows before each round, (n, 128): of all tokens before it and their states."""
        assert self.memory is not None
        lengths = np.diff(data.ends)[rows]
        padded = torch.zeros(len(rows), lengths.max() + 1, self.memory.input_size)
        for number, row in enumerate(rows):
            part = slice(data.ends[row], data.ends[row + 1])
            states = dropout(self._scaled("target", data.target_hidden[part]), self.variant.dropped, self.training)
            padded[number, 1 : lengths[number] + 1] = torch.cat([states, self.embedding[data.response[part].long()]], dim=1)
        known, _ = self.memory(padded)
        number = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
        return known[number, starts - torch.from_numpy(np.repeat(data.ends[rows], lengths))]


def labels_of(data: Positions, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the acceptance probabilities and the draft's probabilities of the kept tokens, (n, K) each."""
    draft = data.draft[places].float()
    return (data.target[places].float() / draft.clamp_min(1e-9)).clamp_max(1.0), draft


def batches(data: Positions, rows: Sequence[int], epoch: int) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
    """Yield responses with their positions and where their rounds began."""
    for piece in slices(len(rows), 1, ROWS):
        chosen = list(rows[piece])
        places = torch.cat([torch.arange(data.ends[row], data.ends[row + 1]) for row in chosen])
        yield chosen, places, data.starts(chosen, epoch)


def trained(variant: Variant, pair: Pair, data: Positions, num_rows: int, teacher: Network | None, seed: int) -> Network:
    """Return a network that has learned from the first rows."""
    torch.manual_seed(seed)
    network, steps = Network(variant, pair, data), math.ceil(num_rows / ROWS) * variant.epochs
    optimizer = torch.optim.AdamW(network.parameters(), lr=variant.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_after_warmup(steps, 0.03))
    rng = np.random.default_rng(seed)
    for epoch in range(variant.epochs):
        for rows, places, starts in batches(data, rng.permutation(num_rows).tolist(), epoch):
            labels, weights = labels_of(data, places)
            which = torch.arange(KEPT).expand(len(places), -1)
            if variant.drafted is not None:
                which = torch.multinomial(weights + 1e-9, variant.drafted, replacement=True)
                labels, weights = labels.gather(1, which), torch.ones_like(which, dtype=torch.float32)
            if teacher is not None:
                with torch.no_grad():
                    labels = teacher(data, rows, places, starts, which).sigmoid()
            logits = network(data, rows, places, starts, which)
            loss = (weights * (labels * softplus(-logits) + (1 - labels) * softplus(logits))).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return network.eval()


@torch.no_grad()
def measured(network: Network, data: Positions) -> list[float]:
    """Return the AUROC of all positions, of first tokens of rounds, of later ones, and the divergence in nats."""
    parts = []
    for rows, places, starts in batches(data, range(len(data.rounds)), -1 % 2**31):
        labels, weights = labels_of(data, places)
        logits = network(data, rows, places, starts, torch.arange(KEPT).expand(len(places), -1))
        parts.append((logits, labels, weights, (places - starts)[:, None].expand_as(logits)))
    logits, labels, weights, place = (torch.cat(each).flatten() for each in zip(*parts, strict=True))
    chosen = (place >= 0, place == 0, place > 0)
    values = [auroc(logits[each], labels[each], weights[each].double()) for each in chosen]
    inner = labels.clamp(1e-6, 1 - 1e-6)
    entropy = -(labels * inner.log() + (1 - labels) * (1 - inner).log())
    losses = labels * softplus(-logits) + (1 - labels) * softplus(logits)
    return [*values, ((weights * (losses - entropy)).sum() / weights.sum()).item()]


def known(data: Positions) -> list[float]:
    """Return the same for the acceptance probabilities themselves, which no network can rank better."""
    rows, places, starts = zip(*batches(data, range(len(data.rounds)), -1 % 2**31), strict=True)
    del rows
    labels, weights = labels_of(data, torch.cat(places))
    place = (torch.cat(places) - torch.cat(starts))[:, None].expand_as(labels).flatten()
    chosen = (place >= 0, place == 0, place > 0)
    return [*(auroc(*(labels.flatten()[each],) * 2, weights.flatten()[each].double()) for each in chosen), 0.0]


def labelled_responses(pair: Pair, root: Path, responses: int, warp: Warp = WARP) -> tuple[list[dict], list[dict]]:
    """Return the rows of train prompts, with so many responses each, and of dev prompts; the first responses come first."""
    settings = Generation(warp=warp, max_new_tokens=128, max_prompt_tokens=256, responses_per_prompt=responses)
    folder = generate_data(pair, NanoSource(1600, 200, 0), settings, root, splits=("train", "dev"))
    train, dev = (sorted(load_split(folder, split), key=lambda row: row["sample"]) for split in ("train", "dev"))
    return train, dev


COLUMNS = [
    *(Column("network"), Column("width"), Column("tokens learned from", "fixed:0"), Column("minutes", "fixed:1")),
    *(
        Column("AUROC", "fixed:4"),
        Column("of first tokens", "fixed:4"),
        Column("of later ones", "fixed:4"),
        Column("KL", "fixed:4"),
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "head_search", help="where data sets are kept")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--seed", type=int, default=0)
    add_result_option(parser, "head_search")
    given = parser.parse_args()
    for number, name in enumerate(given.variants):
        if (teacher := VARIANTS[name].teacher) is not None and teacher not in given.variants[:number]:
            parser.error(f"{name!r} needs {teacher!r} before it")
    pair = load_pair(given.model)
    most = max(VARIANTS[name].responses for name in given.variants)
    train, dev = labelled_responses(pair, given.out / given.model, most)
    data, held_out = positions_of(pair, train), positions_of(pair, dev)
    rows: list[list[Value]] = [["the acceptance probabilities themselves", None, None, None, *known(held_out)]]
    networks: dict[str, Network] = {}
    for name in given.variants:
        variant = VARIANTS[name]
        num_rows = sum(row["sample"] < variant.responses for row in train)
        start = time.perf_counter()
        teacher = None if variant.teacher is None else networks[variant.teacher]
        networks[name] = trained(variant, pair, data, num_rows, teacher, given.seed)
        minutes = (time.perf_counter() - start) / 60
        learned = int(data.ends[num_rows]) * variant.epochs
        rows.append([name, variant.width, learned, minutes, *measured(networks[name], held_out)])
        print(text_of(Table("networks", "", COLUMNS, rows[-1:])), flush=True)
    table = Table("networks", f"Networks on the states of {given.model}'s draft, on dev prompts", COLUMNS, rows)
    prompts = prompt_record(row["prompt_id"] for row in dev)
    write_result(given.result, [table], split="dev", seeds=[given.seed], prompts=prompts)


if __name__ == "__main__":
    main()
