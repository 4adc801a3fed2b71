"""How far a draft agrees with its target along recorded responses, and what follows from that without any stopping rule.

Fixed lengths are counted for token verification, for block verification, and for a draft that agrees more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.stopping import FixedLength
from specheads.integrations.served_target import ServedModel
from specheads.pair import Pair
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, replay, rounds_by_length
from specheads.replay.response_batch import ResponseBatch
from specheads.sampling import Warp, check_finite, overlap


@dataclass(frozen=True)
class Agreement:
    """Draft and target along the responses of P prompts: by prompt, one number for each token of its response."""

    overlaps: Sequence[np.ndarray]  # of the two distributions, before each token
    draft_logprob: Sequence[np.ndarray]  # of the response's tokens under the warped draft
    target_logprob: Sequence[np.ndarray]
    unknown: Sequence[np.ndarray]  # the target's probability of tokens that the draft does not know
    left_out: Sequence[np.ndarray] = ()  # that of tokens that a server which runs the target does not name

    @property
    def sums(self) -> np.ndarray:
        """The sum of overlaps and the number of tokens by prompt, (P, 2)."""
        return np.array([[each.sum(), len(each)] for each in self.overlaps])


@torch.no_grad()
def agreement(pair: Pair, recording: Recording, warp: Warp) -> Agreement:
    """Return how far a pair agrees along the responses of a recording."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    left_out: list[np.ndarray] = []
    known = pair.known_to_draft
    unknown = torch.zeros(pair.vocab_size, dtype=torch.bool) if known is None else ~known
    unknown = unknown.to(pair.draft_lm.device)
    for number, prompt in enumerate(recording.prompts):
        batch = ResponseBatch.of([np.array(prompt)], [np.array(recording.response(number))], pair.draft_lm.device)
        said = batch.response_tokens[:, None]
        states = {lm: batch.states(lm) for lm in (pair.draft_lm, pair.target_lm)}
        probs = [warp(lm.logits(each)).to(pair.draft_lm.device) for lm, each in states.items()]
        for model_id, each in zip((pair.draft_id, pair.target_id), probs, strict=True):
            check_finite(model_id, each)
        values = [overlap(*probs), *(each.gather(1, said).squeeze(1).log() for each in probs), (probs[1] * unknown).sum(dim=1)]
        for column, value in zip(columns, values, strict=True):
            column.append(value.double().cpu().numpy())
        if isinstance(pair.target_lm, ServedModel):
            left_out.append(pair.target_lm.left_out(states[pair.target_lm]).double().numpy())
    return replace(Agreement(*columns), left_out=left_out)


def survival(recording: Recording, longest: int) -> list[float]:
    """Return the chance that at least 1, 2, ... `longest` tokens of a draft are accepted, from any position of the responses."""
    runs = _runs_from(recording)
    return [float((runs >= length).double().mean()) for length in range(1, longest + 1)]


def _runs_from(recording: Recording) -> Tensor:
    """Return how many drafted tokens are accepted from each position on at which a draft may begin, (n,)."""
    accepted, ends = recording.accepted, torch.zeros(recording.accepted.shape[1], dtype=torch.bool)
    ends[recording.first + recording.lengths - 1] = True
    runs = torch.zeros(accepted.shape, dtype=torch.long)
    after = torch.zeros(len(accepted), dtype=torch.long)
    for position in range(accepted.shape[1] - 1, -1, -1):
        after = torch.where(accepted[:, position], 1 + (0 if ends[position] else after), 0)
        runs[:, position] = after
    return runs[accepted | (recording.branch_length > 0)]


def fixed_counts(recording: Recording, lengths: Sequence[int]) -> list[Counts]:
    """Return the counts of fixed lengths under token verification."""
    return [rounds.per_prompt(recording.num_prompts) for rounds in replay(recording, [FixedLength(each) for each in lengths])]


def better_draft(recording: Recording, gain: float, seed: int = 0) -> Recording:
    """Return the recording of a draft whose tokens are accepted more often by a share `gain`, for fixed lengths only.

    Rejections become acceptances at random, equally likely everywhere.
    """
    share = recording.accepted.double().mean().item()
    flipped = min(1.0, share * gain / max(1e-9, 1 - share))
    uniform = torch.rand(recording.accepted.shape, generator=torch.Generator().manual_seed(seed))
    return replace(recording, accepted=recording.accepted | (uniform < flipped))


def chance_accepted(draft_logprob: Tensor, target_logprob: Tensor) -> Tensor:
    """Return the chance that at least 1, 2, ... N tokens were accepted in a round that begins with the first, (..., N).

    Block verification's output follows the target whatever is drafted, so rounds can be drawn after the response. Write D and T
    for the probabilities of a draft's first n tokens under the draft and the target. A path is drafted and at least n of its
    tokens are accepted with probability D p_n, where p_n = min(1, p_{n-1} t / d); that is min(D_n, D_{n-1} p_{n-1} t). Divided by
    T, the chance of the path in the output, it is the smallest D / T so far, at most 1. The law is ours.

    Args:
        draft_logprob, target_logprob: (..., N), of a response's tokens.
    """
    ratio = (draft_logprob - target_logprob).cumsum(dim=-1)
    return ratio.cummin(dim=-1).values.clamp_max(0).exp()


def block_counts(recording: Recording, agreed: Agreement, lengths: Sequence[int], seed: int = 0) -> list[Counts]:
    """Return the counts of fixed lengths under block verification; each sample of the recording is another draw of the rounds."""
    rng = np.random.default_rng(seed)
    uniforms = [rng.random((recording.num_samples, int(length))) for length in recording.lengths]
    return [_block_counts(recording, agreed, length, uniforms) for length in lengths]


def _block_counts(recording: Recording, agreed: Agreement, length: int, uniforms: Sequence[np.ndarray]) -> Counts:
    rows = []
    for prompt, (draft, target) in enumerate(zip(agreed.draft_logprob, agreed.target_logprob, strict=True)):
        total, limit = int(recording.lengths[prompt]), int(recording.limits[prompt])
        # From every position, the chances that the next tokens are accepted; beyond the response's end, never.
        chance = np.zeros((total, length))
        for start in range(total):
            window = slice(start, start + length)
            known = chance_accepted(torch.from_numpy(draft[window]), torch.from_numpy(target[window])).numpy()
            chance[start, : len(known)] = known
        for uniform in uniforms[prompt]:
            start = 0
            while start < total:
                drafted = min(length, limit - start - 1)
                # An end of the response that was drafted ends the draft too.
                accepted = int((chance[start, :drafted] > uniform[start]).sum())
                if bool(recording.finished[prompt]) and start + accepted >= total:
                    accepted = drafted = total - start
                tokens = min(accepted + 1, total - start)
                rows.append((prompt, drafted, accepted, tokens))
                start += tokens
    prompt_of, *columns = (np.array(column) for column in zip(*rows, strict=True))
    drafted_of, accepted_of, tokens_of = (
        np.bincount(prompt_of, weights=column, minlength=recording.num_prompts) for column in columns
    )
    return Counts(tokens_of, drafted_of, accepted_of, rounds_by_length(prompt_of, columns[0], recording.num_prompts))
