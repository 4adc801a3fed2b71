"""Record drafts whose distributions depend on where their round began, as those of a draft that
reads its target do: from every position of a response a whole draft.

A draft from a position follows the response while its tokens are accepted. The first rejected one
is sampled, and then the draft goes on by itself, as long as a round can be. Its first tokens, as
many as are accepted, are those of the response.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specheads.decoding.branches import (
    LOGITS_ELEMENTS,
    MOST_NODES,
    Branches,
    ReadTexts,
    TextReader,
)
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts
from specheads.pair.sampling import Warp, accept_prob, check_finite, sample
from specheads.progress import Advance
from specheads.replay.response_tree import (
    COLUMNS,
    NodeStates,
    ResponseToRecord,
    branch_probs,
    columns_of,
    values_of,
    verified,
)


@torch.no_grad()
def record_chains(
    pair: Pair, texts: Sequence[ResponseToRecord], warp: Warp, num_positions: int, advance: Advance
) -> list[dict[str, object]]:
    """Return the columns of each response as `record_responses` does, with `branch_accepted`, how
    many of the first tokens of each branch are accepted.
    """
    given = GivenTexts.with_responses(
        [text.prompt for text in texts], [text.response for text in texts]
    )
    read = ReadTexts.of_draft(pair, given.tokens[:, :-1])  # nothing follows the last token
    assert read.of_target is not None
    chains = _Chains(pair, texts, warp, given.at(read.of_target))
    num_tokens = len(chains.tokens)
    grown = read.grow(
        chains.begun(given.at(read.hidden)),
        chains.width,
        chains.draw,
        pair.stop_tokens,
        num_positions,
        lambda share: advance(share * num_tokens),
    )
    return chains.columns(grown)


class _Chains:
    """The drafts from all positions of some responses, B in all, as they grow."""

    def __init__(
        self, pair: Pair, texts: Sequence[ResponseToRecord], warp: Warp, of_target: Tensor
    ) -> None:
        """`of_target` (N, H_target) are the target's states that predict the responses' tokens."""
        device = pair.draft_lm.device
        self.pair = pair
        self.texts = texts
        self.warp = warp
        self.of_target = of_target
        responses = [torch.tensor(list(text.response)) for text in texts]
        self.tokens = torch.cat(responses).to(device)  # (N,) long
        self.accept = torch.cat([text.accept for text in texts], dim=1).to(device)  # (Q, N)
        self.reject = torch.cat([text.reject for text in texts], dim=1).to(device)  # (Q, N)
        branch = torch.cat([text.branch for text in texts], dim=1).to(device)
        self.width = branch.shape[-1]
        num_samples = len(branch)
        starts = list[tuple[int, int, int]]()  # number of the text, position in it, tokens
        for number, text in enumerate(texts):
            for start in range(len(text.response)):
                most = min(self.width, text.limit - 1 - start)
                # A single token has no state before it that a draft could read.
                if most > 0 and len(text.prompt) + start > 1:
                    starts.append((number, start, most))
        columns = torch.tensor(starts, dtype=torch.long, device=device).reshape(-1, 3)
        number, start, self.lengths = columns.repeat_interleave(num_samples, dim=0).T
        counts = torch.tensor([len(response) for response in responses], device=device)
        prompts = torch.tensor([len(text.prompt) for text in texts], device=device)
        ends = counts.cumsum(0)
        self.number = number  # (B,) long, the text of each draft
        self.start = start  # (B,) long, the position in the response that it begins at
        self.place = (ends - counts)[number] + start  # (B,) long, the same in `tokens`
        self.end = ends[number]  # (B,) long, the response's end in `tokens`
        self.prefix = prompts[number] + start
        self.sample = torch.arange(num_samples, device=device).repeat(len(starts))
        self.uniform = branch[self.sample, self.place]  # (B, K)
        self.follows = torch.ones_like(self.sample, dtype=torch.bool)  # as far as it has grown
        self.num_accepted = torch.zeros_like(self.sample)
        self.values = torch.zeros((len(COLUMNS), len(number), self.width), device=device)

    def begun(self, hidden: Tensor) -> Branches:
        """Return the drafts with their first tokens, from the draft's states (N, H) that predict
        the responses' tokens.
        """
        lm = self.pair.draft_lm
        first = torch.zeros_like(self.place)
        for rows in slices(len(first), lm.vocab_size, LOGITS_ELEMENTS):
            numbers = torch.arange(len(first), device=first.device)[rows]
            first[rows] = self.draw(numbers, 0, hidden[self.place[rows]])
        return Branches(self.number, self.prefix, first[:, None], self.lengths)

    def draw(self, rows: Tensor, depth: int, hidden: Tensor) -> Tensor:
        """Return the tokens (b,) at a depth of drafts `rows` (b,), which the draft's states (b, H)
        predict.
        """
        logits = self.pair.draft_lm.logits(hidden)
        probs = self.warp(logits)
        check_finite(self.pair.draft_id, probs)
        tokens = self.warp.draw(probs, self.uniform[rows, depth])
        follows = self.follows[rows] & (self.place[rows] + depth < self.end[rows])
        self.follows[rows] = follows
        (along,) = follows.nonzero(as_tuple=True)
        for piece in along.split(max(1, SLICE_ELEMENTS // logits.shape[1])):
            tokens[piece] = self._next(rows[piece], depth, probs[piece])
        self.values[:, rows, depth] = values_of(self.pair.draft_lm, logits, probs, tokens)
        return tokens

    def _next(self, rows: Tensor, depth: int, draft_probs: Tensor) -> Tensor:
        """Return the next tokens (n,) of drafts `rows` (n,) that follow their responses: those of
        the responses where they are accepted, and otherwise rejected ones.
        """
        place = self.place[rows] + depth
        logits = self.pair.target_lm.logits(self.of_target[place.to(self.of_target.device)])
        target_probs = self.warp(logits.to(place.device))
        check_finite(self.pair.target_id, target_probs)
        emitted = self.tokens[place]
        came_from_draft, residual = verified(draft_probs, target_probs, emitted)
        number = self.sample[rows]
        accepted = self.accept[number, place] < came_from_draft
        self.follows[rows] = accepted
        self.num_accepted[rows] += accepted
        rejected = sample(residual[~accepted], self.reject[number, place][~accepted])
        return emitted.masked_scatter(~accepted, rejected)

    def columns(self, grown: Branches) -> list[dict[str, object]]:
        """Return the columns of each response, of the drafts as they have `grown`."""
        num_accepted = self.num_accepted.minimum(grown.lengths)
        columns = list[dict[str, object]]()
        for number, text in enumerate(self.texts):
            (rows,) = (self.number == number).nonzero(as_tuple=True)
            used = grown.used[rows]
            accepted = self.follows.new_zeros((len(text.accept), len(text.response)))
            accepted[self.sample[rows], self.start[rows]] = num_accepted[rows] > 0
            tensors = {
                "accepted": accepted.flatten(),
                "branch_draw": self.sample[rows],
                "branch_start": self.start[rows],
                "branch_length": grown.lengths[rows],
                "branch_ids": grown.tokens[rows][used],
                "branch_accepted": num_accepted[rows],
                **dict(zip(COLUMNS, self.values[:, rows][:, used], strict=True)),
            }
            columns.append(columns_of(self.pair, text, tensors))
        return columns


@torch.no_grad()
def chain_states(
    pair: Pair, prompt: Sequence[int], response: Sequence[int], chains: Branches
) -> Iterator[NodeStates]:
    """Yield tokens (n,) of all drafts `chains` along a response in order, with the draft's hidden
    states (n, H) that they are predicted from.
    """
    lm = pair.draft_lm
    read = ReadTexts.of_draft(pair, torch.tensor([[*prompt, *response][:-1]]))
    chains = chains.to(lm.device)
    width = chains.tokens.shape[1]
    for first in range(0, len(chains.lengths), MOST_NODES // width):
        some = chains.rows(slice(first, first + MOST_NODES // width))
        states = read.hidden.new_zeros((*some.tokens.shape, lm.hidden_size))
        states[:, 0] = read.hidden[0, some.prefix - 1]
        draw = partial(_given, some.tokens, states)
        begun = replace(some, tokens=some.tokens[:, :1])
        read.grow(begun, width, draw, stops=(), num_positions=MOST_NODES)
        _, depth = some.used.nonzero(as_tuple=True)
        yield NodeStates(some.tokens[some.used], states[some.used], depth)


def _given(tokens: Tensor, noted: Tensor, rows: Tensor, depth: int, hidden: Tensor) -> Tensor:
    """Return the next ones of `tokens` (B, K), and note the states (b, H) that predict them."""
    noted[rows, depth] = hidden
    return tokens[rows, depth]


@torch.no_grad()
def chain_probs(
    reader: TextReader,
    warp: Warp,
    chains: Branches,
    start: Tensor,
    num_accepted: Tensor,
    of_response: Tensor,
    draft_prob: Tensor,
) -> Tensor:
    """Return the target's probabilities (n,) of the tokens of drafts, as `branch_probs` does.

    The first `num_accepted` (B,) tokens of each are those of the response from its position `start`
    (B,) on, whose probabilities `of_response` (N,) are known. `draft_prob` (n,) are the draft's.
    """
    width = chains.tokens.shape[1]
    index = torch.arange(width)
    follows = index < num_accepted[:, None]
    of_draft, of_target = draft_prob.new_zeros((2, *chains.tokens.shape))
    of_draft[chains.used] = draft_prob
    places = (start[:, None] + index).clamp_max(len(of_response) - 1)
    of_target[follows] = of_response.to(of_target)[places][follows]
    survival = accept_prob(of_target, of_draft).where(follows, 1.0).prod(dim=1)
    later = (index + num_accepted[:, None]).clamp_max(width - 1)
    rest = Branches(
        chains.text,
        chains.prefix + num_accepted,
        chains.tokens.gather(1, later),
        chains.lengths - num_accepted,
    )
    is_read = chains.used & ~follows
    of_target[is_read] = branch_probs(reader, warp, rest, of_draft[is_read], survival).to(of_target)
    return of_target[chains.used]
