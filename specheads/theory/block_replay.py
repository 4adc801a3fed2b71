"""Which rounds of block verification could have written a recorded response, so that it can be replayed like token verification.

Block verification's output follows the target whatever is drafted, so rounds can be drawn after the response. Write D and T for
the probabilities of a draft's first n tokens under the draft and the target. A path is drafted and at least n of its tokens are
accepted with probability D p_n, where p_n = min(1, p_{n-1} t / d); that is min(D_n, D_{n-1} p_{n-1} t). Divided by T, the
chance of the path in the output, it is the smallest D / T so far, at most 1: the chance that the first n tokens of a response
came from an accepted draft.

After the last accepted token the draft went on to a token that was rejected with all that follow. Given the path to it, none of
it is accepted with probability 1 - p, so tokens there follow norm((d - p t)+), p running along the branch. It does not matter
where the draft stopped. What a branch holds depends on p, and so on where the round began: unlike those of token verification,
branches are drawn for a round, and need the target's distributions along them.

Source: block verification (Sun et al. 2024, algorithm 2); the law of what was drafted, given the output, is ours.
"""

from torch import Tensor


def chance_accepted(draft_logprob: Tensor, target_logprob: Tensor) -> Tensor:
    """Return the chance that at least 1, 2, ... N tokens were accepted in a round that begins with the first, (..., N).

    Args:
        draft_logprob, target_logprob: (..., N), of a response's tokens.
    """
    ratio = (draft_logprob - target_logprob).cumsum(dim=-1)
    return ratio.cummin(dim=-1).values.clamp_max(0).exp()


def num_accepted(chance: Tensor, uniform: Tensor) -> Tensor:
    """Return how many tokens a round accepts of a draft without end, (...): `chance` (..., N), and a uniform number (...)."""
    return (chance > uniform[..., None]).sum(dim=-1)


def pass_chance(before: Tensor, draft_prob: Tensor, target_prob: Tensor) -> Tensor:
    """Return p of a drafted token; all (...), `before` is p of the token before it, and 1 for the first."""
    return (before * target_prob / draft_prob).clamp_max(1)


def branch_probs(before: Tensor, draft: Tensor, target: Tensor) -> Tensor:
    """Return the law (..., V) of a drafted token that is rejected with all that follow; `before` (...) as above."""
    rest = (draft - before[..., None] * target).clamp_min(0)
    return rest / rest.sum(dim=-1, keepdim=True)
