"""What properties are tried on: strategies for warps, prompts, heads, rules, draftings and whole
cases of decoding.
"""

import itertools
from dataclasses import dataclass
from functools import cache

import torch
from chains import Model
from draftings import DRAFTINGS, RULES
from fakes import cut, tiny_pair
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from examples.new_draft import KnownText
from specheads import (
    AcceptanceHead,
    HeadConfig,
    SpeculativeDecoder,
    Warp,
    drafting,
    papers,
    stopping,
    verification,
)
from specheads.decoding.drafting import Drafting
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.stopping.logistic import LOGISTIC_INPUTS

PAIRINGS = [
    (way, rule)
    for way, rule in itertools.product(DRAFTINGS, RULES)
    if DRAFTINGS[way].kind in RULES[rule].takes
]
# of the tiny models
WINDOW = 40
HIDDEN = 16
LONGEST = 8  # tokens of a draft


def tries(times: float):
    """Return settings with so many times the examples that the profile has."""
    return settings(max_examples=max(1, round(times * settings.default.max_examples)))


def probabilities(least: float = 0.0, most: float = 1.0, **bounds: bool):
    return st.floats(least, most, allow_subnormal=False, **bounds)


positive = st.floats(1e-3, 1e3)
temperatures = st.sampled_from([0.0, 0.2, 0.7, 1.0, 2.0]) | st.floats(0.05, 4.0)
warps = st.builds(
    Warp, temperatures, st.integers(0, 9), probabilities(0.05), st.just(0.0) | probabilities()
)
seeds = st.integers(0, 2**32 - 1)


@cache
def pair_of(vocab_size: int, scale: float, same: bool = False, kept: tuple[int, ...] | None = None):
    pair = tiny_pair(vocab_size, scale, WINDOW, same)
    return pair if kept is None else cut(pair, kept)


def kept_tokens(vocab_size: int):
    """Return tokens that the draft's output has; None: all."""
    return st.none() | st.lists(st.integers(0, vocab_size - 1), min_size=1, unique=True).map(tuple)


def prompts(vocab_size: int, longest: int = 6):
    return st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=longest)


# --- models as tables, of which everything can be enumerated


class TableModel(Model):
    """A model with few distributions: the prefix decides which of them comes next."""

    def __init__(self, weights: list[list[int]]) -> None:
        super().__init__(len(weights[0]), 0)
        self.table = torch.tensor(weights, dtype=torch.float64)
        self.table /= self.table.sum(dim=1, keepdim=True)

    def __call__(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return self.table[
            (len(prefix) + sum(token * 7**place for place, token in enumerate(prefix)))
            % len(self.table)
        ]

    def __repr__(self) -> str:
        return f"TableModel({self.table.tolist()})"


def tables(vocab_size: int):
    """Return models whose probabilities are equal, very small or zero more often than chance would
    have it.
    """
    row = st.lists(
        st.sampled_from([0, 1, 2, 3, 10, 10**6]), min_size=vocab_size, max_size=vocab_size
    ).filter(any)
    return st.builds(TableModel, st.lists(row, min_size=1, max_size=5))


# --- heads and stopping rules


@cache
def head_of(
    predicts: str, inputs: tuple[str, ...], seed: int, spread: float, calibration: bool
) -> AcceptanceHead:
    torch.manual_seed(seed)
    values = {"slope": [0.5, 1.5, 1.0], "intercept": [0.5, -0.5, 0.0]} if calibration else None
    config = HeadConfig(HIDDEN, 1, predicts, inputs, 4, calibration=values)
    head = AcceptanceHead(config).double()
    nn.init.normal_(head.readout.weight, std=spread)
    return head.requires_grad_(False)


INPUTS = {
    "next_token": [(), ("hidden",), ("max_prob", "draft_prob")],
    "input_token": [("hidden",), ("hidden", "max_prob", "entropy")],
}


@st.composite
def heads(draw):
    predicts = draw(st.sampled_from(list(INPUTS)))
    inputs = draw(st.sampled_from(INPUTS[predicts]))
    spread = draw(st.sampled_from([0.3, 3.0]))
    return head_of(predicts, inputs, draw(st.integers(0, 2)), spread, draw(st.booleans()))


lengths = st.integers(1, LONGEST)


def with_bounds(kind, *arguments, **named):
    """Return rules with their own `min_tokens` and `max_tokens`."""

    def within(bounds):
        least, most = map(st.just, sorted(bounds))
        return st.builds(kind, *arguments, min_tokens=least, max_tokens=most, **named)

    return st.tuples(lengths, lengths).flatmap(within)


weights = st.dictionaries(
    st.sampled_from([*LOGISTIC_INPUTS, "bias"]), st.floats(-20, 20), min_size=1
).filter(lambda given: set(given) != {"bias"})
numbers = st.floats(-9, 9)
# Rules that read nothing of a draft, rules that read its probabilities, and rules with a head.
length_rules = st.builds(stopping.FixedLength, lengths)
draft_rules = st.one_of(
    st.builds(stopping.MaxProbability, probabilities(), lengths),
    st.builds(stopping.Confidence, probabilities(), lengths),
    with_bounds(stopping.DraftProduct, probabilities()),
    with_bounds(stopping.Logistic, weights, probabilities()),
    with_bounds(stopping.OnlineLogistic, numbers, numbers, positive, probabilities()),
)
head_rules = st.one_of(
    with_bounds(stopping.HeadThreshold, heads(), probabilities()),
    with_bounds(stopping.OnlineHead, heads(), probabilities(), prior=positive),
)
stopping_rules = st.one_of(length_rules, draft_rules, head_rules)


# --- whole cases of decoding

sizes = {"top_k": st.integers(1, 4), "max_nodes": st.integers(1, 20)}
sizes |= {"max_width": st.integers(1, 6), "theta_prob": probabilities()}
sizes |= {"theta_sib": probabilities()}
num_chains = st.integers(1, 4)
graph_sizes = {"tau": st.integers(1, 3), "max_verified": st.integers(20, 40), **sizes}
# By the names of DRAFTINGS, methods of these kinds with their own choices drawn.
METHODS = {
    "chain": st.builds(drafting.Autoregressive),
    "layer_skip": st.builds(papers.LayerSkip, st.sampled_from([[0], [1]])),
    "known_text": st.builds(KnownText, max_ngram=st.integers(1, 4)),
    "beam": st.builds(papers.Beam, num_chains),
    "multi": st.builds(papers.Multi, num_chains),
    "batch": st.builds(papers.Multi, num_chains, merge=st.just(False)),
    "tree": st.builds(papers.Tree, **sizes),
    "graph": st.builds(papers.Graph, **graph_sizes),
}


def verifications(name: str):
    """Return rules of a name, with their own choices drawn."""
    modes = st.sampled_from(["opt", "uno"])
    choices = {
        "biased": st.builds(papers.BiasedVerification, probabilities(), modes),
        "big_little": st.builds(papers.BigLittle, probabilities(), st.floats(0, 9), lengths),
        "joint": st.builds(papers.JointVerification, probabilities(0, 0.99)),
        "synthetic": st.builds(verification.SyntheticVerification, probabilities()),
        "tree_match": st.builds(papers.TreeMatch),
    }
    return choices.get(name, st.builds(RULES[name]))


@dataclass(frozen=True)
class Case:
    """A decoder, and what it is asked for."""

    vocab_size: int
    scale: float
    same: bool
    kept: tuple[int, ...] | None
    drafting: Drafting
    stopping: StoppingRule
    verification: object
    warp: Warp
    window: int
    prompt: list[int]
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    seed: int

    @property
    def pair(self):
        return pair_of(self.vocab_size, self.scale, self.same, self.kept)

    def decoder(self) -> SpeculativeDecoder:
        rules = (self.drafting, self.stopping, self.verification)
        return SpeculativeDecoder(self.pair, *rules, self.warp, "eager", window=self.window)

    @property
    def request(self):
        """The arguments of `generate`."""
        return self.prompt, self.max_new_tokens, self.seed, self.stop_tokens


@st.composite
def cases(draw, pairings=PAIRINGS, warps=warps):
    way, rule = draw(st.sampled_from(pairings))
    vocab_size = draw(st.integers(2, 7))
    prompt = draw(prompts(vocab_size))
    return Case(
        vocab_size,
        draw(st.sampled_from([0.5, 2.0, 8.0])),
        draw(st.booleans()),
        draw(kept_tokens(vocab_size)),
        draw(METHODS[way]),
        draw(stopping_rules if DRAFTINGS[way].reads_draft else length_rules),
        draw(verifications(rule)),
        draw(warps),
        draw(st.integers(len(prompt) + 1, WINDOW)),
        prompt,
        draw(st.integers(1, 24)),
        tuple(draw(st.lists(st.integers(0, vocab_size - 1), max_size=1))),
        draw(seeds),
    )
