"""Drafts of a given length from every position of a recording, as decoding would have drafted them if a round began there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.replay.recording import Recording
from specheads.replay.replay import RecordedHead


@dataclass(frozen=True)
class DraftLogits:
    """A head's logits, before calibration, for the tokens of drafts, with their outcomes: (drafts, K) each."""

    logits: Tensor  # float64; 0 where there is no prediction
    survived: Tensor  # bool, whether this token and all before it were accepted
    known: Tensor  # bool, whether the token was drafted and the head predicted for it; later tokens of the draft are not, either


@dataclass(frozen=True)
class _Drafts:
    """The nodes of drafts, (drafts, K) each; 0 where nothing was drafted."""

    node: Tensor  # long
    num_before: Tensor  # long, how many tokens the round accepted before the node, or before its branch
    survived: Tensor  # bool
    drafted: Tensor  # bool


def draft_logits(recording: Recording, head: RecordedHead, num_tokens: int) -> DraftLogits:
    """Return the predictions of a recorded head for drafts of `num_tokens` from every position of every sample.

    A draft ends before `num_tokens` where decoding would have ended it: at an end-of-sequence token or at the limit.
    """
    late = int(head.config.predicts == "input_token")  # it predicts for a token at the next node
    drafts = _drafts(recording, min(num_tokens + late, recording.max_tokens))
    known = drafts.drafted[:, late:]
    values = recording.feature(head.name, drafts.node[:, late:], drafts.num_before[:, late:]).double()
    return DraftLogits(torch.where(known, values, 0.0), drafts.survived[:, : known.shape[1]], known)


def _drafts(recording: Recording, num_tokens: int) -> _Drafts:
    sample, first = (
        value.flatten()
        for value in torch.meshgrid(torch.arange(recording.num_samples), torch.arange(recording.accepted.shape[1]), indexing="ij")
    )
    response = torch.repeat_interleave(torch.arange(recording.num_prompts), recording.lengths)[first]
    start = first - recording.first[response]
    capacity = recording.limits[response] - start - 1  # the token at the limit is the target's
    depth, going = torch.full_like(first, -1), torch.ones_like(first, dtype=torch.bool)  # depth in the branch; -1: not in one
    columns = []
    for number in range(num_tokens):
        going = going & (number < capacity)
        num_before = torch.where(depth < 0, number, number - 1 - depth)
        position = torch.where(going, first + num_before, first)
        accepted = (depth < 0) & recording.accepted[sample, position]
        depth = torch.where(accepted, -1, depth + 1)
        node = torch.where(accepted, position, recording.branch_first[sample, position] + depth)
        zeros = torch.zeros_like(node)
        columns.append((torch.where(going, node, zeros), torch.where(going, num_before, zeros), accepted & going, going))
        last = recording.finished[response] & (start + number + 1 == recording.lengths[response])
        going = going & ~torch.where(accepted, last, depth + 1 == recording.branch_length[sample, position])
    return _Drafts(*(torch.stack(column, dim=1) for column in zip(*columns, strict=True)))
