"""What can be known about the acceptance of a drafted token, and how much of it a predictor
explains, in nats per token.

A token is accepted with its own chance min(1, p/q): the mean entropy of that is noise, the rest of
the entropy is knowable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.special import entr

from specheads.decoding.stopping.logistic import logistic_inputs
from specheads.heads.metrics import fit_logistic
from specheads.replay.intervals import Groups, Interval, halves, interval, resample_counts
from specheads.replay.recording import GROUND_TRUTH, Recording
from specheads.replay.replay import RecordedHead, head_logits

LOGISTIC, OVERLAP = (
    "free logistic",
    "overlap",
)  # the first is of the draft's confidence and costs nothing
_INPUTS = ("log_draft_prob", "max_prob", "entropy")
_SOURCES = ("draft_prob", "max_prob", "entropy")
_MARGIN = 1e-9
_RIDGE = 1e-5


@dataclass(frozen=True)
class Information:
    """What can be known about the acceptance of a drafted token: means over tokens, with 95 %
    intervals over prompts.
    """

    num_tokens: int
    entropy: Interval  # of the mean acceptance, nats
    noise: Interval  # the entropy of each token's own acceptance probability, nats
    knowable: Interval  # nats
    explained: Mapping[str, Interval]  # by predictor, as a share of what is knowable
    over_logistic: Mapping[
        str, Interval
    ]  # by predictor, that share less the free logistic's; wider for several heads


def information(
    recordings: Sequence[Recording],
    heads: Mapping[str, RecordedHead],
    groups: Groups,
    overlaps: Sequence[Tensor] = (),
) -> Information | None:
    """Return what is knowable about the drafted tokens of recordings, and what predictors explain.

    None if nothing is known.

    Each predictor gets the slope and offset that fit the other half of the prompts. `overlaps`
    (N,), before each token of a recording's responses that of both distributions, are another
    predictor: the chance that a token is accepted before it is drafted.
    """
    if any(GROUND_TRUTH not in recording.features for recording in recordings):
        return None
    firsts = np.cumsum([0, *(recording.num_prompts for recording in recordings)])
    first = torch.from_numpy(halves(groups))
    resamples = resample_counts(groups)

    def parts(of: _Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs (n, k), acceptance probabilities (n,) and prompts (n,) of the tokens of all
        recordings.
        """
        found = [(recording, *of(number, recording)) for number, recording in enumerate(recordings)]
        truth = torch.cat(
            [recording.features[GROUND_TRUTH][node].double() for recording, _, node in found]
        )
        prompts = [
            recording.prompt_of(node) + firsts[number]
            for number, (recording, _, node) in enumerate(found)
        ]
        return torch.cat([inputs for _, inputs, _ in found]), truth, torch.cat(prompts)

    def logistic(number: int, recording: Recording) -> tuple[Tensor, Tensor]:
        node = recording.labels()[0]
        return (
            logistic_inputs(_INPUTS, {name: recording.features[name][node] for name in _SOURCES}),
            node,
        )

    def of_overlap(number: int, recording: Recording) -> tuple[Tensor, Tensor]:
        node = recording.labels()[0]
        return overlaps[number].double().logit(_MARGIN)[_positions(recording)[node], None], node

    def of_head(head: RecordedHead, number: int, recording: Recording) -> tuple[Tensor, Tensor]:
        node, after, _, _ = recording.labels()
        return head_logits(recording, head)[0][:, None], (
            node[after >= 0] if head.config.predicts == "input_token" else node
        )

    predictors: dict[str, _Tokens] = {LOGISTIC: logistic}
    if overlaps:
        predictors[OVERLAP] = of_overlap
    predictors |= {name: partial(of_head, head) for name, head in heads.items()}
    _, truth, prompt = parts(logistic)
    count = len(truth)
    shares = dict[str, np.ndarray]()
    entropy, noise, _ = _nats(truth, torch.zeros_like(truth), prompt, resamples)
    known = entropy - noise > _MARGIN  # few prompts make resamples without tokens
    if not known[0]:
        return None
    for name, of in predictors.items():
        inputs, truth, prompt = parts(of)
        half = first[prompt]
        logits = torch.zeros_like(truth)
        for here in (half, ~half):
            weights = fit_logistic(inputs[~here], truth[~here], ridge=_RIDGE)
            logits[here] = inputs[here].double() @ weights[:-1] + weights[-1]
        most, least, loss = (nats[known] for nats in _nats(truth, logits, prompt, resamples))
        shares[name] = (most - loss) / (most - least).clip(_MARGIN)
    explained = {name: interval(share) for name, share in shares.items()}
    over_logistic = {
        name: interval(
            share - shares[LOGISTIC], len(heads) if name in heads else 1
        )  # the best head is what people look at
        for name, share in shares.items()
        if name != LOGISTIC
    }
    nats = [interval(each[known]) for each in (entropy, noise, entropy - noise)]
    return Information(count, nats[0], nats[1], nats[2], explained, over_logistic)


_Tokens = Callable[
    [int, Recording], tuple[Tensor, Tensor]
]  # inputs (n, k) and nodes (n,) of a recording's tokens, by its number


def _positions(recording: Recording) -> Tensor:
    """Return the position in the responses that their nodes and the first nodes of branches stand
    for, (nodes,) long.
    """
    places = torch.arange(len(recording.tokens))
    here = recording.branch_length > 0
    places[recording.branch_first[here]] = torch.arange(here.shape[1]).expand_as(here)[here]
    return places


def _nats(truth: Tensor, logits: Tensor, prompt: Tensor, resamples: np.ndarray) -> np.ndarray:
    """Return for each resample of the prompts the entropy of the mean, the noise, and the log loss
    of `logits` (n,): (3, R).
    """
    loss = binary_cross_entropy_with_logits(logits, truth, reduction="none")
    columns = torch.stack(
        [torch.ones_like(truth), truth, entr(truth) + entr(1 - truth), loss], dim=1
    )
    sums = torch.zeros(resamples.shape[1], 4, dtype=torch.float64).index_add_(0, prompt, columns)
    count, accepted, noise, losses = (resamples @ sums.numpy()).T
    count = count.clip(1)
    mean = torch.from_numpy(accepted / count)
    return np.stack([(entr(mean) + entr(1 - mean)).numpy(), noise / count, losses / count])
