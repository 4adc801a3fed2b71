"""The rounds in which a draft that reads its target could have drafted a given response.

Such a draft has another distribution at a position after each number of steps that it has made from
its own states: its depth there. So a response is cut into rounds at random, as decoding would have
cut it, had each draft gone on to its first rejected token.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specheads.decoding.stopping import MAX_TOKENS
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, States, read_steps
from specheads.pair.sampling import Warp


@torch.no_grad()
def read_rounds(
    pair: Pair, texts: GivenTexts, uniforms: Tensor, warp: Warp, most: int
) -> tuple[States, Tensor]:
    """Return the states of both models that predict the N tokens of responses, the draft's at one
    depth each, and these depths (N,) long.

    `uniforms` (N,) in [0, 1) decide the rounds. The target's token was a draft's with probability
    min(1, d / t); then the next is one deeper, up to MAX_TOKENS of a round. Else the next begins a
    round. At most `most` probabilities are held at once.
    """
    of_target, steps = read_steps(pair, texts)
    device = of_target.device
    uniforms = uniforms.to(device)
    position = texts.position.to(device)
    tokens = texts.tokens.to(device)[texts.row.to(device), position + 1]
    # The first token of a text has no state before it that the draft could read
    ends_round = position == 0
    ends_round[texts.row.bincount().cumsum(0) - 1] = True
    target_probs = _probs_of(tokens, pair.target_lm, of_target, warp, most)
    # Rounds begin at all positions at once; those that are there are chosen in the end
    starts = torch.arange(len(tokens), device=device)
    lengths = torch.zeros_like(starts)
    taken = list[tuple[Tensor, Tensor]]()  # of each depth, places among the N and states there
    while len(starts) and len(taken) < MAX_TOKENS:
        places = starts + len(taken)
        states = next(steps)[places]
        taken.append((places, states))
        lengths[starts] = len(taken)
        draft_probs = _probs_of(tokens[places], pair.draft_lm, states, warp, most).to(device)
        was_drafted = uniforms[places] * target_probs[places] < draft_probs
        starts = starts[was_drafted & ~ends_round[places]]
    rounds = [torch.arange(length) for length in _in_a_row(lengths.tolist())]
    depths = torch.cat(rounds).to(device)
    of_draft = torch.empty_like(taken[0][1])
    for depth, (places, states) in enumerate(taken):
        is_there = depths[places] == depth
        of_draft[places[is_there]] = states[is_there]
    return States(of_target, of_draft), depths


def _in_a_row(lengths: Sequence[int]) -> Iterator[int]:
    """Yield the lengths of rounds that follow each other, of those that begin at each place."""
    start = 0
    while start < len(lengths):
        yield lengths[start]
        start += lengths[start]


def _probs_of(tokens: Tensor, lm: LanguageModel, states: Tensor, warp: Warp, most: int) -> Tensor:
    """Return the probabilities (n,) of `tokens` (n,) where a model has the states (n, H)."""
    tokens = tokens.to(states.device)[:, None]
    probs = list[Tensor]()
    for piece in slices(len(tokens), lm.vocab_size, most):
        probs.append(warp(lm.logits(states[piece])).gather(1, tokens[piece])[:, 0])
    return torch.cat(probs)
