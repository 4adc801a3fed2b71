"""Record every token that a stopping rule can draft along a target's response, so that rules can be replayed without models.

The output of token verification has the target's distribution for drafts of any length, so decoding could have emitted a response
that the target sampled. At each position two things are sampled once, as verification would have sampled them given the response:
whether the emitted token came from an accepted draft token, with probability `min(1, d(x) / t(x))`; and if not, the token that
was rejected there, from `norm((d - t)+)`, and how the draft continues after it. These continuations are the *branches*.

A *node* is a drafted token with its features: first the response's tokens in order, then those of one branch after another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.branches import Branches, ReadTexts
from specheads.heads.features import RECORDED, drafting_features
from specheads.integrations.served_target import ServedModel
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import right_padded
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, accept_prob, check_finite, sample

SLICE_ELEMENTS = 2**24  # probabilities held at once per model
COLUMNS = (*RECORDED, "law_prob")  # per node; law_prob: the token's probability under the draft's warped distribution


@dataclass(frozen=True)
class RecordSettings:
    """The amounts that a recording holds. `num_samples`: acceptance samples per response; in greedy mode there is only one."""

    num_samples: int = 4
    max_tokens: int = 20  # the longest draft that can be replayed
    batch_size: int = 64  # branches of the longest text that are drafted together


@dataclass(frozen=True)
class ResponseUniforms:
    """Uniform numbers of one response: for the acceptance of its tokens (Q, N), rejected tokens (Q, N) and branches (Q, N, K)."""

    accept: Tensor
    reject: Tensor
    branch: Tensor

    @classmethod
    def of(cls, seed: int, prompt_id: str, num_samples: int, num_tokens: int, max_tokens: int) -> "ResponseUniforms":
        """Return the numbers of a prompt; they do not depend on other prompts."""
        rng = np.random.default_rng([seed, int(prompt_id, 16), 1])
        shapes = (num_samples, num_tokens), (num_samples, num_tokens), (num_samples, num_tokens, max_tokens)
        return cls(*(torch.from_numpy(rng.random(shape)) for shape in shapes))


@dataclass(frozen=True)
class ResponseToRecord:
    """A response to a prompt, ids of both, with its uniform numbers.

    `limit` is the number of tokens at which it would have ended; decoding drafts no further than the one before.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    limit: int
    uniforms: ResponseUniforms

    @property
    def read(self) -> list[int]:
        """What models read of it: all but the last token."""
        return [*self.prompt, *self.response][:-1]


@torch.no_grad()
def record_responses(
    pair: Pair, texts: Sequence[ResponseToRecord], warp: Warp, settings: RecordSettings, num_positions: int
) -> list[dict[str, Any]]:
    """Return the columns of each response; see `recording.SCHEMA`. Their branches are drafted together.

    Args:
        num_positions: of the draft's memory for branches that are drafted together.
    """
    read = right_padded([text.read for text in texts])
    draft_read = ReadTexts.of(pair.draft_lm, read)
    target_hidden = pair.target_lm.hidden_states(read.to(pair.target_lm.device), use_cache=False)
    starts = [
        _start(pair, number, text, (draft_read.hidden[number], target_hidden[number]), warp, settings)
        for number, text in enumerate(texts)
    ]
    begun = Branches(*(torch.cat(values) for values in zip(*(vars(start.begun).values() for start in starts), strict=True)))
    first_values = torch.cat([start.first_values for start in starts], dim=1)
    branch_values = first_values.new_zeros((*first_values.shape, settings.max_tokens))
    branch_values[:, :, 0] = first_values

    def keep(rows: Tensor, depth: int, logits: Tensor, distribution: Tensor, sampled: Tensor) -> None:
        branch_values[:, rows, depth] = _values(logits, distribution, sampled)

    uniform = torch.cat([start.uniform for start in starts])
    branches = draft_read.grow(pair, begun, uniform, warp, num_positions, keep)
    columns, first = [], 0
    for text, start in zip(texts, starts, strict=True):
        rows = slice(first, first + len(start.sample))
        columns.append(start.columns(pair, text, branches.rows(rows), branch_values[:, rows]))
        first = rows.stop
    return columns


@dataclass(frozen=True)
class _Start:
    """What follows from the states along one response: its outcomes, and the first tokens of its b branches.

    `accepted` (Q, N) bool and the columns `values` (C, N) of its tokens; `sample` (b,) and `position` (b,) of the branches in
    `begun`, the columns `first_values` (C, b) of their first tokens, and their numbers `uniform` (b, K).
    """

    accepted: Tensor
    values: Tensor
    sample: Tensor
    position: Tensor
    begun: Branches
    first_values: Tensor
    uniform: Tensor

    def columns(self, pair: Pair, text: ResponseToRecord, branches: Branches, branch_values: Tensor) -> dict[str, Any]:
        """Return the columns of the response from its grown branches and their columns (C, b, K)."""
        return {
            "response_ids": list(text.response),
            "limit": text.limit,
            "finished": text.response[-1] in pair.stop_tokens,
            "accepted": self.accepted.flatten().cpu().numpy(),
            "branch_draw": self.sample.cpu().numpy(),
            "branch_start": self.position.cpu().numpy(),
            "branch_length": branches.lengths.cpu().numpy(),
            "branch_ids": branches.tokens[branches.used].cpu().numpy(),
            **dict(zip(COLUMNS, torch.cat([self.values, branch_values[:, branches.used]], dim=1).cpu().numpy(), strict=True)),
        }


def _start(
    pair: Pair,
    number: int,
    text: ResponseToRecord,
    hidden: tuple[Tensor, Tensor],
    warp: Warp,
    settings: RecordSettings,
) -> _Start:
    """Return the start of recording the response in row `number` of a batch.

    Args:
        hidden: the states (T, H) of the draft and of the target in that row; those after its end mean nothing.
    """
    used = slice(len(text.prompt) - 1, len(text.prompt) + len(text.response) - 1)
    draft_hidden, target_hidden = (each[used] for each in hidden)
    tokens = torch.tensor(list(text.response), device=pair.draft_lm.device)
    uniforms = ResponseUniforms(*(value.to(tokens.device) for value in vars(text.uniforms).values()))
    parts = []
    for piece in torch.arange(len(tokens), device=tokens.device).split(_slice_size(pair, settings)):
        draft_logits = pair.draft_lm.logits(draft_hidden[piece])
        target_logits = pair.target_lm.logits(target_hidden[piece.to(target_hidden.device)]).to(tokens.device)
        parts.append(_outcomes(pair, draft_logits, target_logits, tokens[piece], piece, text.limit, warp, uniforms))
    accepted, values, draft_sample, start, first, first_values = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
    order = torch.argsort(start * settings.num_samples + draft_sample)  # branches are stored by position
    draft_sample, start = draft_sample[order], start[order]
    lengths = (text.limit - 1 - start).clamp_max(settings.max_tokens)
    begun = Branches(torch.full_like(start, number), len(text.prompt) + start, first[order, None], lengths)
    return _Start(accepted, values, draft_sample, start, begun, first_values[:, order], uniforms.branch[draft_sample, start])


def _slice_size(pair: Pair, settings: RecordSettings) -> int:
    return max(1, SLICE_ELEMENTS // pair.vocab_size // settings.num_samples)


def _outcomes(
    pair: Pair,
    draft_logits: Tensor,
    target_logits: Tensor,
    tokens: Tensor,
    positions: Tensor,
    limit: int,
    warp: Warp,
    uniforms: ResponseUniforms,
) -> tuple[Tensor, ...]:
    """Sample the outcomes of drafts at a slice of `positions` (n,), where the response has `tokens` (n,).

    Returns whether the tokens were accepted (Q, n) and their columns (C, n); then, of the tokens that were rejected in their
    place, the sample, the position, the token (b,) and the columns (C, b).
    """
    draft_probs, target_probs = warp(draft_logits), warp(target_logits)
    check_finite(pair.draft_id, draft_probs)
    check_finite(pair.target_id, target_probs)
    # The share of the target's probability of a token that comes from an accepted draft token: min(d, t) / t.
    came_from_draft = accept_prob(
        *(distribution.gather(1, tokens[:, None]).squeeze(1) for distribution in (draft_probs, target_probs))
    )
    residual = (draft_probs - target_probs).clamp_min(0)
    # Where rounding leaves nothing that could have been rejected, the two distributions are the same.
    accepted = (uniforms.accept[:, positions] < came_from_draft) | (residual.sum(dim=1) <= 0)
    draft_sample, row = (~accepted & (positions < limit - 1)).nonzero(as_tuple=True)
    rejected = sample(residual[row], uniforms.reject[draft_sample, positions[row]])
    columns, rejected_columns = _values(draft_logits, draft_probs, tokens), _values(draft_logits[row], draft_probs[row], rejected)
    return accepted, columns, draft_sample, positions[row], rejected, rejected_columns


def _values(logits: Tensor, distribution: Tensor, tokens: Tensor) -> Tensor:
    """Return COLUMNS (C, n) of `tokens` (n,) sampled from draft `logits` and their warped `distribution` (n, V)."""
    features = drafting_features(RECORDED, logits, tokens)
    return torch.stack([*(features[name] for name in RECORDED), distribution.gather(1, tokens[:, None]).squeeze(1)]).float()


@torch.no_grad()
def node_states(
    lm: LanguageModel, prompt: Sequence[int], response: Sequence[int], branches: Branches, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens (n,) of all nodes of a response in order, and the hidden states (n, H) that `lm` predicts them from."""
    if isinstance(lm, ServedModel):
        yield _served_states(lm, prompt, response, branches)
        return
    read = ReadTexts.of(lm, torch.tensor([[*prompt, *response][:-1]]))
    yield torch.tensor(list(response), device=lm.device), read.hidden[0, len(prompt) - 1 :]
    tokens, used = branches.tokens.to(lm.device), branches.used.to(lm.device)
    for rows, states in read.states(branches, batch_size):
        width = states.shape[1]
        yield tokens[rows, :width][used[rows, :width]], states[used[rows, :width]]


def _served_states(lm: ServedModel, prompt: Sequence[int], response: Sequence[int], branches: Branches) -> tuple[Tensor, Tensor]:
    """Return the tokens and states of all nodes of a response; a server reads every branch as a text from its beginning."""
    whole, branches = [*prompt, *response], branches.to(lm.device)
    drafts = [tokens[:length].tolist() for tokens, length in zip(branches.tokens, branches.lengths.tolist(), strict=True)]
    texts = [whole[:prefix] + draft[:-1] for prefix, draft in zip(branches.prefix.tolist(), drafts, strict=True)]
    along, *after = lm.states([whole[:-1], *texts])
    states = [along[len(prompt) - 1 :], *(each[-len(draft) :] for each, draft in zip(after, drafts, strict=True))]
    return torch.tensor([*response, *(token for draft in drafts for token in draft)]), torch.cat(states)
