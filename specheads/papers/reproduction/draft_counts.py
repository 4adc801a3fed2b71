"""Drafts of several candidates in numbers: which children are accepted, and how often drafts repeat themselves."""

from specheads.decoding.records import DraftTree, Generation

DRAFT_COUNTS = ("first_reached", "first_accepted", "second_reached", "second_accepted", "bigrams", "bigrams_repeated")


def draft_counts(generation: Generation) -> dict[str, int]:
    """Return DRAFT_COUNTS over the drafts of a response.

    Of first and second children how many verification reached, which are those of the context and of accepted nodes, and how many
    it accepted. Siblings are in the order in which they were drafted: of chosen tokens the most likely first, of samples the
    first sampled. Of bigrams that end at a drafted node, how many end at an earlier node of the same draft, too: those that a
    token graph merges with tau = 2 (Gong et al. 2024, GSD, section 3).
    """
    counts, last = dict.fromkeys(DRAFT_COUNTS, 0), int(generation.prompt_ids[-1])
    for each in generation.rounds:
        if each.tree is not None:
            _count(each.tree, last, counts)
        last = each.tokens[-1]
    return counts


def _count(tree: DraftTree, last: int, counts: dict[str, int]) -> None:
    """Add those of a draft after the token `last`."""
    path, seen = set(tree.path), set()
    siblings = dict.fromkeys((-1, *tree.path), 0)  # by node that was reached: its children so far
    for node, parent in enumerate(tree.parents):
        if parent in siblings:
            if siblings[parent] < 2:
                rank = ("first", "second")[siblings[parent]]
                counts[f"{rank}_reached"] += 1
                counts[f"{rank}_accepted"] += node in path
            siblings[parent] += 1
    for parent, token in zip(tree.parents[: tree.num_drafted], tree.tokens, strict=False):
        bigram = last if parent < 0 else tree.tokens[parent], token
        counts["bigrams"] += 1
        counts["bigrams_repeated"] += bigram in seen
        seen.add(bigram)
