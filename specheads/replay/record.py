"""Record what every stopping rule would meet along a target's response (so that rules can be replayed without models).

Token verification emits the target's law whatever the draft's lengths, so a response that the target sampled is what decoding would
have emitted. At each of its positions two things are drawn once, as verification would have drawn them given what was emitted: whether
the emitted token came from an accepted draft token, with chance `min(1, d(x) / t(x))`; and if not, the token that was rejected there,
from `norm((d - t)+)`, and how the draft goes on from it. These *branches* are what a draft wastes its time on.

A *node* is a drafted token with what rules see of it: first the response's own tokens in order, then the branches' one after another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.engine import EagerEngine
from specheads.pair import LanguageModel, Pair
from specheads.sampling import Warp, accept_prob, certainty, check_finite, sample

SLICE_ELEMENTS = 2**24  # probabilities held at once per model
FEATURES = ("draft_prob", "max_prob", "entropy")  # of the draft's plain softmax, as rules see them
COLUMNS = (*FEATURES, "law_prob")  # per node; law_prob: the warped law that the token was drawn from


@dataclass(frozen=True)
class RecordSettings:
    """What a recording holds. `num_draws`: acceptance draws per response; greedy decoding has but one."""

    num_draws: int = 4
    max_tokens: int = 20  # the longest draft that can be replayed
    batch_size: int = 64  # branches drafted together


@dataclass(frozen=True)
class Draws:
    """Uniform numbers of one response: what becomes of its tokens (Q, N), rejected tokens (Q, N), how branches go on (Q, N, K)."""

    accept: Tensor
    reject: Tensor
    branch: Tensor

    @classmethod
    def of(cls, seed: int, prompt_id: str, num_draws: int, num_tokens: int, max_tokens: int) -> "Draws":
        """Return the numbers that belong to a prompt, whatever its neighbours."""
        rng = np.random.default_rng([seed, int(prompt_id, 16), 1])
        shapes = (num_draws, num_tokens), (num_draws, num_tokens), (num_draws, num_tokens, max_tokens)
        return cls(*(torch.from_numpy(rng.random(shape)) for shape in shapes))


@dataclass(frozen=True)
class Branches:
    """Drafts that begin with a rejected token: rows (B,) of the draw and position each belongs to, tokens (B, K), their number."""

    draw: Tensor
    start: Tensor
    tokens: Tensor
    lengths: Tensor


@torch.no_grad()
def record_response(
    pair: Pair, prompt: Sequence[int], response: Sequence[int], limit: int, warp: Warp, draws: Draws, settings: RecordSettings
) -> dict[str, Any]:
    """Return the columns of one response; see `recording.SCHEMA`.

    Args:
        limit: tokens at which the response would have ended; decoding drafts no further than the one before.
    """
    engine, draft_hidden = _read(pair.draft_lm, prompt, response)
    _, target_hidden = _read(pair.target_lm, prompt, response)
    tokens = torch.tensor(list(response), device=pair.draft_lm.device)
    draws = Draws(*(value.to(tokens.device) for value in vars(draws).values()))
    parts = []
    for piece in torch.arange(len(tokens), device=tokens.device).split(_slice_size(pair, settings)):
        draft_logits = pair.draft_lm.logits(draft_hidden[piece])
        target_logits = pair.target_lm.logits(target_hidden[piece.to(target_hidden.device)]).to(tokens.device)
        parts.append(_fates(pair, draft_logits, target_logits, tokens[piece], piece, limit, warp, draws))
    accepted, values, draw, start, first, first_values = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
    order = torch.argsort(start * settings.num_draws + draw)  # by position, so that rows of a batch are of similar length
    lengths = (limit - 1 - start[order]).clamp_max(settings.max_tokens)
    begun = Branches(draw[order], start[order], first[order, None], lengths)
    branches, branch_values = _grow(pair, engine, len(prompt), begun, first_values[:, order], warp, draws, settings)
    used = torch.arange(branches.tokens.shape[1], device=tokens.device) < branches.lengths[:, None]
    return {
        "response_ids": list(response),
        "limit": limit,
        "finished": response[-1] in pair.stop_tokens,
        "accepted": accepted.flatten().cpu().numpy(),
        "branch_draw": branches.draw.cpu().numpy(),
        "branch_start": branches.start.cpu().numpy(),
        "branch_length": branches.lengths.cpu().numpy(),
        "branch_ids": branches.tokens[used].cpu().numpy(),
        **dict(zip(COLUMNS, torch.cat([values, branch_values[:, used]], dim=1).cpu().numpy(), strict=True)),
    }


def _slice_size(pair: Pair, settings: RecordSettings) -> int:
    return max(1, SLICE_ELEMENTS // pair.vocab_size // settings.num_draws)


def _fates(
    pair: Pair,
    draft_logits: Tensor,
    target_logits: Tensor,
    tokens: Tensor,
    positions: Tensor,
    limit: int,
    warp: Warp,
    draws: Draws,
) -> tuple[Tensor, ...]:
    """Draw what became of drafts at a slice of `positions` (n,), where the response has `tokens` (n,).

    Returns whether the tokens were accepted (Q, n), their columns (C, n), and of the rejected tokens in their place draw, position, token
    (b,) and columns (C, b).
    """
    draft_law, target_law = warp(draft_logits), warp(target_logits)
    check_finite(pair.draft_id, draft_law)
    check_finite(pair.target_id, target_law)
    # The share of the target's probability of a token that comes by way of an accepted draft: min(d, t) / t.
    came_from_draft = accept_prob(*(law.gather(1, tokens[:, None]).squeeze(1) for law in (draft_law, target_law)))
    residual = (draft_law - target_law).clamp_min(0)
    # Where rounding leaves nothing that could have been rejected, the two laws are the same.
    accepted = (draws.accept[:, positions] < came_from_draft) | (residual.sum(dim=1) <= 0)
    draw, row = (~accepted & (positions < limit - 1)).nonzero(as_tuple=True)
    rejected = sample(residual[row], draws.reject[draw, positions[row]])
    columns, rejected_columns = _values(draft_logits, draft_law, tokens), _values(draft_logits[row], draft_law[row], rejected)
    return accepted, columns, draw, positions[row], rejected, rejected_columns


def _read(lm: LanguageModel, prompt: Sequence[int], response: Sequence[int]) -> tuple[EagerEngine, Tensor]:
    """Return an engine that has read the text but its last token, and the states (N, H) that the response's tokens come from."""
    text = torch.tensor([[*prompt, *response][:-1]], device=lm.device)
    engine = EagerEngine(lm, text.shape[1])
    return engine, engine.forward(text, num_logits=0).hidden[0, len(prompt) - 1 :]


def _values(logits: Tensor, law: Tensor, tokens: Tensor) -> Tensor:
    """Return COLUMNS (C, n) of `tokens` (n,) drawn from draft `logits` and `law` (n, V)."""
    return torch.stack([*certainty(logits, tokens), law.gather(1, tokens[:, None]).squeeze(1)]).float()


def _grow(
    pair: Pair,
    engine: EagerEngine,
    prompt_length: int,
    begun: Branches,
    values: Tensor,
    warp: Warp,
    draws: Draws,
    settings: RecordSettings,
) -> tuple[Branches, Tensor]:
    """Let the draft go on from the first tokens of branches; return them with the columns (C, B, K) of their tokens.

    `values` (C, B) are those of the first tokens. A branch ends with its length, or earlier with a token that ends a response.
    """
    count, width = len(begun.start), settings.max_tokens
    tokens = begun.tokens.new_zeros((count, width))
    columns = values.new_zeros((len(values), count, width))
    tokens[:, 0], columns[:, :, 0] = begun.tokens[:, 0], values
    lengths = begun.lengths.clone()
    stops = torch.tensor(sorted(pair.stop_tokens), dtype=torch.long, device=tokens.device)
    for rows in torch.arange(count, device=tokens.device).split(settings.batch_size) if count else ():
        prefix = prompt_length + begun.start[rows]
        fork, mask = engine.fork(prefix, width)
        uniform = draws.branch[begun.draw[rows], begun.start[rows]]
        for depth in range(1, int(lengths[rows].max())):
            ended = torch.isin(tokens[rows, depth - 1], stops)
            lengths[rows] = torch.where(ended, lengths[rows].clamp_max(depth), lengths[rows])
            if int(lengths[rows].max()) <= depth:
                break
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            positions = (prefix + depth - 1)[:, None]
            logits = fork.forward(tokens[rows, depth - 1, None], positions=positions, attention_mask=mask).logits[:, -1]
            law = warp(logits)
            check_finite(pair.draft_id, law)
            tokens[rows, depth] = warp.draw(law, uniform[:, depth])
            columns[:, rows, depth] = _values(logits, law, tokens[rows, depth])
        del fork  # or the next one would lie beside it
    return Branches(begun.draw, begun.start, tokens, lengths), columns


@torch.no_grad()
def node_states(
    lm: LanguageModel, prompt: Sequence[int], response: Sequence[int], branches: Branches, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens (n,) of all nodes of a response in order, and the hidden states (n, H) that `lm` predicts them from.

    Each text is read once: the response in one forward, its branches in batches on what was kept of it.
    """
    engine, trunk = _read(lm, prompt, response)
    yield torch.tensor(list(response), device=lm.device), trunk
    for rows in torch.arange(len(branches.start)).split(batch_size) if len(branches.start) else ():
        start, lengths, tokens = (value[rows].to(lm.device) for value in (branches.start, branches.lengths, branches.tokens))
        states, longest = trunk[start, None], int(lengths.max())
        if longest > 1:
            prefix = len(prompt) + start
            fork, mask = engine.fork(prefix, longest - 1)
            positions = prefix[:, None] + torch.arange(longest - 1, device=lm.device)
            mask = torch.nn.functional.pad(mask, (0, longest - 1), value=1)
            output = fork.forward(tokens[:, : longest - 1], positions=positions, attention_mask=mask, num_logits=0)
            states = torch.cat([states, output.hidden], dim=1)
            del fork, output  # or the next ones would lie beside them
        used = torch.arange(longest, device=lm.device) < lengths[:, None]
        yield tokens[:, :longest][used], states[used]
