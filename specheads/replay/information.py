"""How uncertain the acceptance of a drafted token is, and which share of that a predictor explains,
in nats per token.

A token is accepted with its own probability min(1, p/q): the mean entropy of that is irreducible,
the rest of the entropy is reducible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

LOGISTIC = "free logistic"  # of the draft's confidence: it needs no forward pass
_INPUTS = ("log_draft_prob", "max_prob", "entropy")
_SOURCES = ("draft_prob", "max_prob", "entropy")
_MARGIN = 1e-9
_RIDGE = 1e-5


@dataclass(frozen=True)
class Information:
    """The uncertainty about the acceptance of a drafted token: means over tokens, with 95 %
    intervals over prompts.
    """

    num_tokens: int
    entropy: Interval  # of the mean acceptance, nats
    irreducible: Interval  # the entropy of each token's own acceptance probability, nats
    reducible: Interval  # nats
    explained: Mapping[str, Interval]  # by predictor, as a share of what is reducible
    # By predictor, that share less the free logistic's; wider for several heads
    over_logistic: Mapping[str, Interval]


@dataclass(frozen=True)
class _Tokens:
    """The drafted tokens of recordings that a predictor predicts."""

    inputs: Tensor  # (n, k), what the predictor says of them
    truth: Tensor  # (n,), their acceptance probabilities
    prompt: Tensor  # (n,) long, the numbers of their prompts


def information(
    recordings: Sequence[Recording],
    heads: Mapping[str, RecordedHead],
    groups: Groups,
) -> Information | None:
    """Return the uncertainty about the drafted tokens of recordings, and what predictors explain.

    None where it is not recorded, or nothing is reducible.

    Each predictor gets the slope and offset that fit the other half of the prompts.
    """
    if any(GROUND_TRUTH not in recording.features for recording in recordings):
        return None
    resamples = resample_counts(groups)
    first_half = torch.from_numpy(halves(groups))
    logistic = [_logistic(recording) for recording in recordings]
    every = _joined(recordings, logistic)
    entropy, irreducible, _ = _nats(
        every.truth, torch.zeros_like(every.truth), every.prompt, resamples
    )
    reducible = entropy - irreducible
    known = reducible > _MARGIN  # few prompts make resamples without tokens
    if not known[0]:
        return None
    shares = dict[str, np.ndarray]()
    predictors = {LOGISTIC: logistic}
    for name, head in heads.items():
        predictors[name] = [_head(recording, head) for recording in recordings]
    for name, inputs in predictors.items():
        tokens = _joined(recordings, inputs)
        nats = _nats(tokens.truth, _fitted(tokens, first_half), tokens.prompt, resamples)
        most, least, loss = nats[:, known]
        shares[name] = (most - loss) / (most - least).clip(_MARGIN)
    over_logistic = dict[str, Interval]()
    for name, share in shares.items():
        if name != LOGISTIC:
            # People look at the best head
            over_logistic[name] = interval(share - shares[LOGISTIC], len(heads))
    return Information(
        num_tokens=len(every.truth),
        entropy=interval(entropy[known]),
        irreducible=interval(irreducible[known]),
        reducible=interval(reducible[known]),
        explained={name: interval(share) for name, share in shares.items()},
        over_logistic=over_logistic,
    )


_Inputs = tuple[Tensor, Tensor]  # of a recording's tokens (n, k), and the tokens' nodes (n,)


def _logistic(recording: Recording) -> _Inputs:
    node = recording.labels().node
    features = {name: recording.features[name][node] for name in _SOURCES}
    return logistic_inputs(_INPUTS, features), node


def _head(recording: Recording, head: RecordedHead) -> _Inputs:
    logits, _ = head_logits(recording, head)
    tokens = recording.labels()
    if head.config.predicts == "input_token":
        tokens = tokens.chosen(tokens.after >= 0)
    return logits[:, None], tokens.node


def _joined(recordings: Sequence[Recording], inputs: Sequence[_Inputs]) -> _Tokens:
    """Return the tokens of all recordings, with their prompts numbered one after another."""
    truths = []
    prompts = []
    num_prompts = 0
    for recording, (_, node) in zip(recordings, inputs, strict=True):
        truths.append(recording.features[GROUND_TRUTH][node].double())
        prompts.append(recording.prompt_of(node) + num_prompts)
        num_prompts += recording.num_prompts
    return _Tokens(
        torch.cat([of_recording for of_recording, _ in inputs]),
        torch.cat(truths),
        torch.cat(prompts),
    )


def _fitted(tokens: _Tokens, first_half: Tensor) -> Tensor:
    """Return logits (n,), by the logistic regression that fits the other half of the prompts."""
    half = first_half[tokens.prompt]
    logits = torch.zeros_like(tokens.truth)
    for here in (half, ~half):
        weights = fit_logistic(tokens.inputs[~here], tokens.truth[~here], ridge=_RIDGE)
        logits[here] = tokens.inputs[here].double() @ weights[:-1] + weights[-1]
    return logits


def _nats(truth: Tensor, logits: Tensor, prompt: Tensor, resamples: np.ndarray) -> np.ndarray:
    """Return for each resample of the prompts the entropy of the mean, the irreducible entropy, and
    the log loss of `logits` (n,): (3, R).
    """
    loss = binary_cross_entropy_with_logits(logits, truth, reduction="none")
    columns = torch.stack(
        [torch.ones_like(truth), truth, entr(truth) + entr(1 - truth), loss], dim=1
    )
    sums = torch.zeros(resamples.shape[1], 4, dtype=torch.float64).index_add_(0, prompt, columns)
    count, accepted, irreducible, losses = (resamples @ sums.numpy()).T
    count = count.clip(1)
    mean = torch.from_numpy(accepted / count)
    return np.stack([(entr(mean) + entr(1 - mean)).numpy(), irreducible / count, losses / count])
