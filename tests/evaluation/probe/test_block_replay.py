"""Rounds that are drawn after a response have the law of decoding, by enumeration."""

import itertools
from collections import defaultdict

import pytest
import torch

from specheads.evaluation.probe.prediction import chance_accepted

LONGEST = 3


def num_accepted(chance, uniform):
    """How many tokens a round accepts of a draft without end."""
    return (chance > uniform[..., None]).sum(dim=-1)


def pass_chance(before, draft_prob, target_prob):
    """p of a drafted token; `before` is p of the token before it, and 1 for the first."""
    return (before * target_prob / draft_prob).clamp_max(1)


def branch_probs(before, draft, target):
    """The law of a drafted token that is rejected with all that follow."""
    rest = (draft - before[..., None] * target).clamp_min(0)
    return rest / rest.sum(dim=-1, keepdim=True)


@pytest.fixture(params=[0, 1, 2])
def laws(request):
    """Return the draft's and the target's law by prefix, on three tokens; one token is impossible for the target at times."""
    generator = torch.Generator().manual_seed(request.param)
    paths = [path for n in range(LONGEST + 1) for path in itertools.product(range(3), repeat=n)]
    laws = {}
    for number, path in enumerate(paths):
        pair = torch.rand(2, 3, dtype=torch.float64, generator=generator) ** 2
        pair[1, number % 3] *= number % 4 > 0
        laws[path] = pair / pair.sum(dim=1, keepdim=True)
    return laws


def stops(path):
    """A rule that looks at the drafted tokens."""
    return len(path) == LONGEST or path[-1] == 2 or path == (0, 1)


def decoded(laws):
    """Return the law of (draft, accepted tokens, next token) by block verification itself."""
    outcomes = defaultdict(float)
    drafts = [((), 1.0, [torch.ones((), dtype=torch.float64)])]
    while drafts:
        path, chance, passes = drafts.pop()
        if path and stops(path):
            for accepted, next_law, share in verified(path, passes, laws):
                for token in range(3):
                    outcomes[path, accepted, token] += chance * share * float(next_law[token])
            continue
        draft, target = laws[path]
        for token in range(3):
            passed = pass_chance(passes[-1], draft[token], target[token])
            drafts.append(((*path, token), chance * float(draft[token]), [*passes, passed]))
    return outcomes


def verified(path, passes, laws):
    """Yield each accepted length with the law of the next token and its chance (Sun et al. 2024, algorithm 2)."""
    left = 1.0
    for accepted in range(len(path), -1, -1):
        draft, target = laws[path[:accepted]]
        excess = (passes[accepted] * target - draft).clamp_min(0)
        if accepted == len(path):
            passed, law = float(passes[accepted]), target
        elif accepted == 0:
            passed, law = 1.0, excess / excess.sum() if excess.sum() > 0 else target
        else:
            total = excess.sum()
            passed = float(total / (total + 1 - passes[accepted])) if total > 0 or passes[accepted] < 1 else 1.0
            law = excess / total if total > 0 else target
        yield accepted, law, left * passed
        left *= 1 - passed


def replayed(laws):
    """Return the same law from the target's responses, and rounds that are drawn after them."""
    outcomes = defaultdict(float)
    for response in itertools.product(range(3), repeat=LONGEST + 1):
        prefixes = [response[:n] for n in range(LONGEST + 1)]
        probs = torch.stack([laws[prefix][:, token] for prefix, token in zip(prefixes, response, strict=True)], dim=1)
        whole = float(probs[1].prod())
        if not whole:
            continue
        chance = chance_accepted(*probs.log())
        edges = [1.0, *chance[:LONGEST].tolist(), 0.0]
        for accepted in range(LONGEST + 1):
            share = edges[accepted] - edges[accepted + 1]
            end = next((n for n in range(1, accepted + 1) if stops(response[:n])), None)
            if share <= 0:
                continue
            assert num_accepted(chance[:LONGEST], torch.tensor(edges[accepted + 1] + share / 2)) == accepted
            if end is not None:
                outcomes[response[:end], end, response[end]] += whole * share
                continue
            before = torch.ones((), dtype=torch.float64)
            for n in range(accepted):
                before = pass_chance(before, *laws[response[:n]][:, response[n]])
            branches = [(response[:accepted], 1.0, before)]
            while branches:
                path, likely, before = branches.pop()
                for token, law in enumerate(branch_probs(before, *laws[path]).tolist()):
                    if law and stops((*path, token)):
                        outcomes[(*path, token), accepted, response[accepted]] += whole * share * likely * law
                    elif law:
                        passed = pass_chance(before, *laws[path][:, token])
                        branches.append(((*path, token), likely * law, passed))
    return outcomes


def test_rounds_drawn_after_the_response_have_the_law_of_decoding(laws):
    live, drawn = decoded(laws), replayed(laws)
    assert sum(live.values()) == pytest.approx(1) and sum(drawn.values()) == pytest.approx(1)
    for outcome in live.keys() | drawn.keys():
        assert drawn[outcome] == pytest.approx(live[outcome], abs=1e-12), outcome


def test_the_law_of_a_branch_depends_on_where_the_round_began():
    draft, target = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.1, 0.6]], dtype=torch.float64)
    early, late = (branch_probs(torch.tensor(before, dtype=torch.float64), draft, target) for before in (1.0, 0.5))
    assert early.tolist() == pytest.approx([0.5, 0.5, 0.0]) and late.tolist() == pytest.approx([0.35 / 0.6, 0.25 / 0.6, 0.0])
