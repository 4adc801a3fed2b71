"""Record every token that a stopping rule can draft along a target's response, so that rules can be
replayed without models.

At each position of a response that the target sampled, it is sampled once whether its token came
from an accepted draft token, with probability `min(1, d(x) / t(x))`, and if not, which was rejected
there, from `norm((d - t)+)`, and how the draft continues after it: a *branch*. A *node* is a
drafted token: first the response's in order, then those of one branch after another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.branches import MOST_NODES, Branches, ReadTexts, TextReader
from specheads.decoding.stopping import MAX_TOKENS
from specheads.heads.features import RECORDED, drafting_features
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, states_of
from specheads.pair.sampling import Warp, accept_prob, active, check_finite, sample
from specheads.progress import Advance

CACHED = (
    2**19
    # Logits whose features are computed at once on a CPU: of 160 distributions at once they take
    # 1.8 times as long
)
# Per node; law_prob: the token's probability under the draft's warped distribution
COLUMNS = *RECORDED, "law_prob"


@dataclass(frozen=True)
class RecordSettings:
    """The amounts that a recording holds. `num_samples`: acceptance samples per response.

    In greedy mode there is only one.
    """

    num_samples: int = 4
    max_tokens: int = MAX_TOKENS  # the longest draft that can be replayed


@dataclass(frozen=True)
class ResponseToRecord:
    """A response to a prompt, ids of both, with its uniform numbers."""

    prompt: Sequence[int]
    response: Sequence[int]
    # The number of tokens at which it would have ended; decoding drafts no further than the one
    # before
    limit: int
    accept: Tensor  # (Q, N), the numbers for the acceptance of its tokens
    reject: Tensor  # (Q, N), for the tokens that are rejected in their place
    branch: Tensor  # (Q, N, K), for the branches

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        response: Sequence[int],
        limit: int,
        settings: RecordSettings,
        seed: int,
        prompt_id: str,
    ) -> "ResponseToRecord":
        """Return a response with numbers that do not depend on other prompts."""
        rng = np.random.default_rng([seed, int(prompt_id, 16), 1])
        shape = (settings.num_samples, len(response))
        accept = torch.from_numpy(rng.random(shape))
        reject = torch.from_numpy(rng.random(shape))
        branch = torch.from_numpy(rng.random((*shape, settings.max_tokens)))
        return cls(prompt, response, limit, accept, reject, branch)

    @property
    def read(self) -> list[int]:
        """What models read of it: all but the last token."""
        return [*self.prompt, *self.response][:-1]


@torch.no_grad()
def record_responses(
    pair: Pair,
    texts: Sequence[ResponseToRecord],
    warp: Warp,
    num_positions: int,
    advance: Advance = lambda count: None,
) -> list[dict[str, object]]:
    """Return the columns of each response; see `recording.SCHEMA`.

    Their branches are drafted together.

    The draft's memory for these has about `num_positions`; `advance` is called with how much is
    done, in tokens of the responses.
    """
    given = GivenTexts.with_responses(
        [text.prompt for text in texts], [text.response for text in texts]
    )
    given = given._replace(tokens=given.tokens[:, :-1])  # nothing follows the last token
    draft_read = ReadTexts.of(pair.draft_lm, given.tokens)
    of_draft = given.of_rows(given.at(draft_read.hidden))
    of_target = given.of_rows(states_of(pair.target_lm, given))
    starts = list[_Start]()
    for number, text in enumerate(texts):
        starts.append(_start(pair, number, text, of_draft[number], of_target[number], warp))
    columns_of_branches = zip(*(vars(start.begun).values() for start in starts), strict=True)
    begun = Branches(*map(torch.cat, columns_of_branches))
    uniform = torch.cat([start.uniform for start in starts])
    first_values = torch.cat([start.first_values for start in starts], dim=1)
    width = uniform.shape[1]
    branch_values = first_values.new_zeros((*first_values.shape, width))
    branch_values[:, :, 0] = first_values

    def draw(rows: Tensor, depth: int, hidden: Tensor) -> Tensor:
        logits = pair.draft_lm.logits(hidden)
        probs = warp(logits)
        check_finite(pair.draft_id, probs)
        tokens = warp.draw(probs, uniform[rows, depth])
        branch_values[:, rows, depth] = values_of(pair.draft_lm, logits, probs, tokens)
        return tokens

    num_tokens = sum(len(text.response) for text in texts)
    grown = draft_read.grow(
        begun,
        width,
        draw,
        pair.stop_tokens,
        num_positions,
        lambda share: advance(share * num_tokens),
    )
    columns: list[dict[str, object]] = []
    ends = np.cumsum([len(start.sample) for start in starts]).tolist()
    for text, start, first, end in zip(texts, starts, [0, *ends], ends, strict=False):
        branches = grown.rows(slice(first, end))
        values = torch.cat([start.values, branch_values[:, first:end][:, branches.used]], dim=1)
        tensors = {
            "accepted": start.accepted.flatten(),
            "branch_draw": start.sample,
            "branch_start": start.begun.prefix - len(text.prompt),
            "branch_length": branches.lengths,
            "branch_ids": branches.tokens[branches.used],
            **dict(zip(COLUMNS, values, strict=True)),
        }
        columns.append(columns_of(pair, text, tensors))
    return columns


def columns_of(
    pair: Pair, text: ResponseToRecord, tensors: Mapping[str, Tensor]
) -> dict[str, object]:
    """Return the columns of one response, of which `tensors` has those of its drafts."""
    columns: dict[str, object] = {
        "response_ids": list(text.response),
        "limit": text.limit,
        "finished": text.response[-1] in pair.stop_tokens,
    }
    for name, column in tensors.items():
        columns[name] = column.cpu().numpy()
    return columns


class _Start(NamedTuple):
    """What follows from the states along one response: its outcomes, and the first tokens of its b
    branches.
    """

    accepted: Tensor  # (Q, N) bool
    values: Tensor  # (C, N), the columns of its tokens
    sample: Tensor  # (b,), of the branches in `begun`
    begun: Branches
    first_values: Tensor  # (C, b), the columns of their first tokens
    uniform: Tensor  # (b, K), their numbers


def _start(
    pair: Pair,
    number: int,
    text: ResponseToRecord,
    draft_hidden: Tensor,
    target_hidden: Tensor,
    warp: Warp,
) -> _Start:
    """Return the start of recording the response in row `number` of a batch, from the states (N, H)
    of both models that predict its tokens.
    """
    tokens = torch.tensor(list(text.response), device=pair.draft_lm.device)
    num_samples = len(text.accept)
    accept = text.accept.to(tokens.device)
    reject = text.reject.to(tokens.device)
    branch = text.branch.to(tokens.device)
    parts = []
    size = max(1, SLICE_ELEMENTS // pair.vocab_size // num_samples)
    for piece in torch.arange(len(tokens), device=tokens.device).split(size):
        draft_logits = pair.draft_lm.logits(draft_hidden[piece])
        target_logits = pair.target_lm.logits(target_hidden[piece.to(target_hidden.device)])
        draft_probs = warp(draft_logits)
        target_probs = warp(target_logits.to(tokens.device))
        check_finite(pair.draft_id, draft_probs)
        check_finite(pair.target_id, target_probs)
        emitted = tokens[piece]
        came_from_draft, residual = verified(draft_probs, target_probs, emitted)
        accepted = accept[:, piece] < came_from_draft
        draft_sample, row = (~accepted & (piece < text.limit - 1)).nonzero(as_tuple=True)
        rejected = sample(residual[row], reject[draft_sample, piece[row]])
        columns = values_of(pair.draft_lm, draft_logits, draft_probs, emitted)
        rejected_columns = values_of(pair.draft_lm, draft_logits[row], draft_probs[row], rejected)
        parts.append((accepted, columns, draft_sample, piece[row], rejected, rejected_columns))
    accepted, values, draft_sample, start, first, first_values = (
        torch.cat(part, dim=-1) for part in zip(*parts, strict=True)
    )
    order = torch.argsort(start * num_samples + draft_sample)  # branches are stored by position
    draft_sample = draft_sample[order]
    start = start[order]
    lengths = (text.limit - 1 - start).clamp_max(branch.shape[-1])
    begun = Branches(
        torch.full_like(start, number), len(text.prompt) + start, first[order, None], lengths
    )
    return _Start(
        accepted, values, draft_sample, begun, first_values[:, order], branch[draft_sample, start]
    )


def verified(draft_probs: Tensor, target_probs: Tensor, emitted: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for tokens `emitted` (n,), the chance (n,) that each came from an accepted draft
    token, and the weights (n, V) of the token that was rejected in its place otherwise.
    """
    # The share of the target's probability of a token that comes from an accepted draft token:
    # min(d, t) / t.
    came_from_draft = accept_prob(_of(draft_probs, emitted), _of(target_probs, emitted))
    residual = (draft_probs - target_probs).clamp_min(0)
    # Where rounding leaves nothing that could have been rejected, the two distributions are the
    # same.
    return came_from_draft.where(residual.sum(dim=1) > 0, 1), residual


def _of(probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the probability (n,) of each of `tokens` (n,) in its distribution (n, V)."""
    return probs.gather(1, tokens[:, None]).squeeze(1)


def values_of(draft: LanguageModel, logits: Tensor, distribution: Tensor, tokens: Tensor) -> Tensor:
    """Return COLUMNS (C, n) of `tokens` (n,) sampled from draft `logits` and their warped
    `distribution` (n, V).
    """
    size = CACHED if logits.device.type == "cpu" else logits.numel()
    parts: dict[str, list[Tensor]] = {name: [] for name in RECORDED}
    for piece in slices(len(tokens), logits.shape[1], size):
        features = drafting_features(
            RECORDED,
            logits[piece],
            tokens[piece],
            kept_tokens=draft.kept_tokens,
            sums_of=active().softmax_sums,
        )
        for name, of_feature in parts.items():
            of_feature.append(features[name])
    return torch.stack([*map(torch.cat, parts.values()), _of(distribution, tokens)]).float()


# Of branches whose states are computed together: more attend to more keys that they do not see
NODES_AT_ONCE = 256
# Of a branch, below which the target does not read on: no ceiling drafts on that is rejected so
# surely
LEAST_SURVIVAL = 0.05
# To which branches are read before those with less survival are left out
DEPTHS = 1, 2, 3, 5, 8, 12


class NodeStates(NamedTuple):
    """Tokens (n,) of some nodes, and the hidden states (n, H) that they are predicted from."""

    tokens: Tensor
    hidden: Tensor
    # (n,) long, how many tokens of the round were drafted before, where states depend on it
    depth: Tensor | None = None


def node_states(
    reader: TextReader, prompt: Sequence[int], response: Sequence[int], branches: Branches
) -> Iterator[NodeStates]:
    """Yield all nodes of a response in order, with the states of the reader's model."""
    device = reader.lm.device
    longest = branches.tokens.shape[1]
    yield NodeStates(
        torch.tensor(list(response), device=device),
        reader.read([*prompt, *response][:-1])[len(prompt) - 1 :],
    )
    branches = branches.to(device)
    all_rows = torch.arange(len(branches.lengths), device=device)
    for rows in all_rows.split(NODES_AT_ONCE // longest) if len(all_rows) else ():
        number, depth = branches.used[rows].nonzero(as_tuple=True)
        reader.forget_branches()
        states = reader.states(branches, rows[number], depth)
        yield NodeStates(branches.tokens[rows[number], depth], states)


@torch.no_grad()
def response_probs(
    reader: TextReader, warp: Warp, prompt: Sequence[int], response: Sequence[int]
) -> Tensor:
    """Return the target's probabilities (N,) of a response's tokens; `reader` reads the target."""
    states = reader.read([*prompt, *response][:-1])[len(prompt) - 1 :]
    return _probs_of(reader, warp, states, torch.tensor(list(response), device=states.device))


@torch.no_grad()
def branch_probs(
    reader: TextReader,
    warp: Warp,
    branches: Branches,
    draft_prob: Tensor,
    survival: Tensor | None = None,
) -> Tensor:
    """Return the target's probabilities (n,) of the tokens of branches of the text that was read.

    These are zero from where on the tokens before them survive with less than LEAST_SURVIVAL, by
    the draft's `draft_prob` (n,) and the target's; `survival` (B,), default 1, is that of what is
    before the branches.
    """
    device = reader.lm.device
    branches = branches.to(device)
    longest = branches.tokens.shape[1]
    depths = [0, *(depth for depth in DEPTHS if depth < longest), longest]
    of_draft, of_target = draft_prob.new_zeros((2, *branches.tokens.shape), device=device)
    of_draft[branches.used] = draft_prob.to(device)
    before = of_draft.new_ones(len(of_draft)) if survival is None else survival.to(device)
    alive = torch.arange(len(branches.lengths), device=device)
    for rows in alive.split(MOST_NODES // longest) if len(alive) else ():
        reader.forget_branches()
        survival = before[rows]
        for first, end in pairwise(depths):
            goes_on = (survival >= LEAST_SURVIVAL) & (branches.lengths[rows] > first)
            rows = rows[goes_on]
            survival = survival[goes_on]
            number, depth = branches.used[rows, first:end].nonzero(as_tuple=True)
            row = rows[number]
            depth = depth + first
            states = reader.states(branches, row, depth)
            found = _probs_of(reader, warp, states, branches.tokens[row, depth])
            of_target[row, depth] = found.to(of_target)
            accepted = accept_prob(of_target[rows, first:end], of_draft[rows, first:end])
            survival = survival * accepted.where(branches.used[rows, first:end], 1.0).prod(dim=1)
    return of_target[branches.used]


def _probs_of(reader: TextReader, warp: Warp, states: Tensor, tokens: Tensor) -> Tensor:
    """Return the probabilities (n,) of `tokens` (n,) by the states (n, H) that predict them."""
    parts = list[Tensor]()
    for piece in slices(len(tokens), reader.lm.vocab_size, SLICE_ELEMENTS):
        parts.append(_of(warp(reader.lm.logits(states[piece])), tokens[piece]))
    return torch.cat(parts)
