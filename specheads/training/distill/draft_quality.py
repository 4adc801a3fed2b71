"""How good a draft is for its target along the target's responses, and the draft's temperature with
the largest overlap.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from specheads.pair.feature_draft import FeatureDraft
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS, slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, StatesByDepth, read_by_depth, states_of
from specheads.pair.revisions import set_draft_temperature
from specheads.pair.sampling import Warp, check_numbers, naming_rows, overlap
from specheads.progress import progress
from specheads.training.distill.distill_loss import forward_kl
from specheads.training.distill.samples import Sample, Samples, place_of, texts_of

logger = logging.getLogger(__name__)

# In the order of their distance from 1, which stays where none is better. A draft is rarely best
# outside of them.
TEMPERATURES = (1.0, 0.95, 1.05, 0.9, 1.1, 0.85, 1.15, 0.8, 1.2, 0.75, 0.7)
BLOCK = 4  # drafted tokens per round of the block efficiencies that are recorded


def block_efficiency(overlaps: Sequence[float]) -> float:
    """Return the expected tokens per round that drafts a token for each of K overlaps: `(1 -
    a^(K+1)) / (1 - a)` where all are a (Leviathan et al. 2023, equation 1).
    """
    return sum(accumulate(overlaps, mul, initial=1.0))


def draft_states(draft: LanguageModel, texts: GivenTexts) -> Tensor:
    """Return the states (N, H) of a draft that reads tokens alone."""
    return states_of(draft, texts, _read_at_once(draft.model, texts))


def _read_at_once(draft: PreTrainedModel, texts: GivenTexts) -> int:
    """Return how many tokens a draft reads at once: all where its weights are spread over
    processes, as its layers must then run equally often in all of them.
    """
    return texts.tokens.numel() if isinstance(draft, FSDPModule) else BATCH_TOKENS


def states_by_depth(pair: Pair, texts: GivenTexts, num_steps: int) -> StatesByDepth:
    """Return the states of both models, those of a draft that reads its target after 1 to
    `num_steps` steps; of an ordinary draft all depths are one.
    """
    if pair.draft_lm.reads_layers:
        return read_by_depth(pair, texts, num_steps, _read_at_once(pair.draft, texts))
    hidden = draft_states(pair.draft_lm, texts)[:, None]
    exists = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    return StatesByDepth(states_of(pair.target_lm, texts), hidden, exists)


class _Slice(NamedTuple):
    """Both models' logits of some tokens: the target's (n, V), and the draft's of the tokens that
    its output has, (m, V_kept) for each depth, with which of the n tokens it is for, (n,) bool.
    """

    target: Tensor
    draft: Iterator[tuple[Tensor, Tensor]]


def _logits_of(
    pair: Pair, draft: LanguageModel, samples: Sequence[Sample], device: torch.device
) -> Iterator[_Slice]:
    """Yield the logits of target and draft along responses, a slice at a time.

    Raises UserError where they are NaN.
    """
    target = pair.target_lm
    states = states_by_depth(pair, texts_of(samples), BLOCK)

    def of_draft(piece: slice) -> Iterator[tuple[Tensor, Tensor]]:
        for depth, exists in enumerate(states.exists[piece].unbind(1)):
            logits = draft.kept_logits(states.draft[piece, depth][exists]).to(device)
            check_numbers(pair.draft_id, logits)
            yield exists.to(device), logits

    for piece in slices(len(states.target), pair.vocab_size, SLICE_ELEMENTS):
        logits = target.logits(states.target[piece]).to(device)
        check_numbers(pair.target_id, logits)
        yield _Slice(logits, of_draft(piece))


def _of_kept(draft: LanguageModel, of_target: Tensor) -> Tensor:
    """Return what the target has (n, V) for the tokens that the draft's output has."""
    kept = draft.kept_tokens
    return of_target if kept is None else of_target[:, kept.to(of_target.device)]


@torch.no_grad()
def quality_sums(pair: Pair, samples: Sequence[Sample], warp: Warp, device: torch.device) -> Tensor:
    """Return (D, 4) sums over response tokens at each depth: overlap under `warp`, KL(t || d), same
    most likely token (1 or 0), and 1.
    """
    draft = pair.draft_lm
    num_depths = BLOCK if isinstance(pair.draft, FeatureDraft) else 1
    sums = torch.zeros(num_depths, 4, dtype=torch.float64)
    for target, of_draft in _logits_of(pair, draft, samples, device):
        best = target.argmax(-1)
        probs = _of_kept(draft, warp(target))
        log_probs = _of_kept(draft, target.log_softmax(-1))
        for depth, (exists, logits) in enumerate(of_draft):
            shared = overlap(probs[exists], warp(logits)).sum().item()
            kl = forward_kl(log_probs[exists], logits.log_softmax(-1)).sum().item()
            proposed = draft.tokens_at(logits.argmax(-1).to(draft.device)).to(device)
            agreeing = (best[exists] == proposed).sum().item()
            sums[depth] += torch.tensor([shared, kl, agreeing, len(logits)], dtype=torch.float64)
    return sums.to(device, torch.float32 if device.type == "mps" else torch.float64)


def quality_of(sums: Tensor) -> dict[str, float]:
    """Return the figures of a draft, by name, from sums (D, 4) over tokens.

    A draft of several depths also has its overlap after each number of own steps.
    """
    share, divergence, agreement = (sums[:, :3].sum(0) / sums[:, 3].sum()).tolist()
    by_depth = (sums[:, 0] / sums[:, 3].clamp_min(1)).tolist()
    several = len(by_depth) > 1
    figures = {
        "overlap": share,
        "kl": divergence,
        "agreement": agreement,
        f"block_efficiency_{BLOCK}": block_efficiency(by_depth if several else by_depth * BLOCK),
    }
    if several:
        figures |= {f"overlap_{depth}": value for depth, value in enumerate(by_depth)}
    return figures


def _batches(samples: Samples, batch_size: int, what: str) -> Iterator[list[Sample]]:
    """Yield all samples in their order, with a progress bar."""
    with progress(what, len(samples)) as advance:
        for first in range(0, len(samples), batch_size):
            rows = range(first, min(first + batch_size, len(samples)))
            yield [samples[0, row] for row in rows]
            advance(len(rows))


def draft_quality(pair: Pair, samples: Samples, warp: Warp, batch_size: int) -> dict[str, float]:
    """Return the figures of a pair's draft, with its present weights, over all samples."""
    device = pair.draft_lm.device
    was_training = pair.draft.training
    pair.draft.eval()
    sums = list[Tensor]()

    def measured(some: Sequence[Sample]) -> Tensor:
        return quality_sums(pair, some, warp, device)

    for batch in _batches(samples, batch_size, "measuring the draft"):
        sums.append(naming_rows(measured, batch, place_of))
    pair.draft.train(was_training)
    return quality_of(reduce(torch.add, sums))


@torch.no_grad()
def overlaps_at(pair: Pair, samples: Samples, warp: Warp, batch_size: int) -> dict[float, float]:
    """Return the mean overlap under `warp` along the responses for each temperature of the pair's
    draft.
    """
    # At temperature 1, whatever its config says
    draft = LanguageModel(pair.draft, pair.vocab_size, known=pair.known_to_draft)
    sums = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
    count = 0
    for batch in _batches(samples, batch_size, "temperatures of the draft"):
        for target, of_draft in _logits_of(pair, draft, batch, draft.device):
            probs = _of_kept(draft, warp(target))
            for exists, logits in of_draft:
                expected = probs[exists]
                for number, temperature in enumerate(TEMPERATURES):
                    sums[number] += overlap(expected, warp(logits / temperature)).sum().item()
                count += len(logits)
    return dict(zip(TEMPERATURES, (sums / count).tolist(), strict=True))


def with_fitted_temperature(pair: Pair, samples: Samples, warp: Warp, batch_size: int) -> Pair:
    """Write the temperature with the largest overlap into the config of the pair's draft.

    Return the pair that drafts at it.
    """
    overlaps = overlaps_at(pair, samples, warp, batch_size)
    best = max(overlaps, key=overlaps.__getitem__)  # the first of equals
    set_draft_temperature(pair.draft, best)
    logger.info(
        "draft temperature %g: overlap %.4f on dev prompts, %.4f at 1",
        best,
        overlaps[best],
        overlaps[1.0],
    )
    return replace(pair)
