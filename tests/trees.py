"""Drafted trees on tiny vocabularies, and the exact distribution of what decoding emits with
them.
"""

import itertools
from dataclasses import replace
from functools import cache

import torch

from specheads.papers.trees.verification import Draft, TreeBlock


def drafter_in(decoder):
    """Return what drafts trees or beams in a decoder."""
    drafter = decoder.single.rounds.drafter
    return getattr(drafter, "search", drafter)


def distributions_after(model, nodes):
    """Return a model's distributions after the context and after every node, (N + 1, V)."""
    paths = [()]
    for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return torch.stack([model(path) for path in paths]), paths


def of_chains(chains, merge=True):
    """Return the tree of chains that were drawn level by level."""
    nodes = Draft()
    ends = [-1] * len(chains)
    for depth in range(len(chains[0])):
        ends = [
            nodes.add(end, chain[depth], merge) for chain, end in zip(chains, ends, strict=True)
        ]
    return nodes


def trees_of(draft, count, length, merge=True):
    """Yield every tree of `count` chains of `length` tokens, and its probability."""
    options = list(itertools.product(range(draft.vocab_size), repeat=length))
    for chains in itertools.product(options, repeat=count):
        prob = 1.0
        for chain in chains:
            prob *= draft(())[chain[0]].item() * draft.joint(chain[1:], chain[:1])
        if prob > 0:
            yield of_chains(chains, merge), prob


def emitted(rule, target, draft, trees, num_tokens):
    """Return the exact distribution of the first `num_tokens` tokens (V, ..., V) where a round
    drafts one of `trees` and the target goes on alone.
    """

    @cache
    def joint_after(begun, count):
        """Return the target's distribution of `count` tokens (V, ..., V) after `begun`."""
        if not count:
            return torch.ones((), dtype=torch.float64)
        following = [joint_after((*begun, token), count - 1) for token in range(target.vocab_size)]
        return torch.stack(
            [prob * rest for prob, rest in zip(target(begun), following, strict=True)]
        )

    total = torch.zeros((target.vocab_size,) * num_tokens, dtype=torch.float64)
    for nodes, tree_prob in trees:
        target_probs, paths = distributions_after(target, nodes)
        draft_probs, _ = distributions_after(draft, nodes)
        drafted = replace(nodes, draft_probs=draft_probs)
        distribution = rule.distribution(TreeBlock.of(drafted, target_probs))
        reach = [tree_prob]
        for move, parent in zip(distribution.moves.tolist(), nodes.parents, strict=True):
            reach.append(reach[parent + 1] * move)
        for row, path in enumerate(paths):
            children = [n for n, parent in enumerate(nodes.parents) if parent == row - 1]
            stay = reach[row] * (1 - distribution.moves[children].sum().item())
            following = distribution.next_probs(torch.tensor([row]))[0]
            for token, prob in enumerate((following / following.sum()).tolist()):
                begun = (*path, token)
                total[begun[:num_tokens]] += (
                    stay * prob * joint_after(begun, max(0, num_tokens - len(begun)))
                )
    return total
