"""Token graphs on hand-worked token sequences."""

import torch
from fakes import tiny_pair

from specheads import SpeculativeDecoder, Warp, papers, stopping
from specheads.pair.sampling import Uniforms
from specheads.papers.gsd import unmerge
from specheads.papers.trees.verification import ROOT, Draft


def tree(*drawn):
    nodes = Draft()
    for parent, token in drawn:
        nodes.add(parent, token)
    return nodes


def paths(nodes):
    """Return the tokens of every path that ends in a leaf, sorted."""
    leaves = set(range(len(nodes))) - set(nodes.parents)
    return sorted([nodes.tokens[node] for node in nodes.path(leaf)] for leaf in leaves)


def test_the_continuation_of_the_first_occurrence_is_copied_after_the_second():
    # 7 8 9 6, and 5 7 8, which ends in the run 7 8: 9 6 follows there too.
    nodes = tree((ROOT, 7), (0, 8), (1, 9), (2, 6), (ROOT, 5), (4, 7), (5, 8))
    unmerge(nodes, {6: 1}, depth=5, most=64)
    assert paths(nodes) == [[5, 7, 8, 9, 6], [7, 8, 9, 6]]
    assert nodes.tokens[7:] == [9, 6] and nodes.parents[7:] == [6, 7] and nodes.depth[7:] == [3, 4]


def test_copies_are_as_deep_as_the_draft_may_be():
    nodes = tree((ROOT, 7), (0, 8), (1, 9), (2, 6), (ROOT, 5), (4, 7), (5, 8))
    unmerge(nodes, {6: 1}, depth=4, most=64)
    assert paths(nodes) == [[5, 7, 8, 9], [7, 8, 9, 6]]


def test_all_branches_after_the_first_occurrence_are_copied():
    nodes = tree((ROOT, 7), (0, 8), (1, 9), (1, 6), (ROOT, 5), (4, 7), (5, 8))
    unmerge(nodes, {6: 1}, depth=6, most=64)
    assert paths(nodes) == [[5, 7, 8, 6], [5, 7, 8, 9], [7, 8, 6], [7, 8, 9]]


def test_a_run_that_contains_itself_repeats_to_the_longest_draft():
    # 1 2 1 2: the second 1 2 is the first again, so what follows it is 1 2 once more.
    nodes = tree((ROOT, 1), (0, 2), (1, 1), (2, 2))
    unmerge(nodes, {3: 1}, depth=7, most=64)
    assert paths(nodes) == [[1, 2, 1, 2, 1, 2, 1]]


def test_a_merged_node_after_a_merged_node_gets_copies_too():
    # What 3 repeats ends in 4, which repeats 0.
    nodes = tree((ROOT, 1), (0, 2), (ROOT, 3), (1, 1), (2, 2))
    unmerge(nodes, {3: 0, 4: 1}, depth=5, most=64)
    assert paths(nodes) == [[1, 2, 1, 2, 1], [3, 2, 1, 2, 1]]


def test_no_more_nodes_than_asked_for_shallow_ones_first():
    nodes = tree((ROOT, 1), (0, 2), (1, 1), (2, 2))
    unmerge(nodes, {3: 1}, depth=50, most=9)
    assert len(nodes) == 9 and max(nodes.depth) == 8


GROWN = {"theta_prob": 0.0, "theta_sib": 0.0, "top_k": 2, "max_nodes": 60, "max_width": 40}
WIDE = GROWN | {"top_k": 3, "max_nodes": 400}


def linked():
    """Return a graph of six levels over six tokens, and its drafter."""
    way = papers.Graph(tau=1, max_verified=400, **WIDE)
    decoder = SpeculativeDecoder(
        tiny_pair(6), way, stopping.FixedLength(6), warp=Warp(0), engine="eager"
    )
    device = torch.device("cpu")
    state = decoder.stopping.start_prompt(1, device)
    no_ends = torch.zeros(6, dtype=torch.bool)
    draft = decoder.single.rounds.drafter.draft([0, 1, 2], state, 6, Uniforms(device, 0), no_ends)
    return draft, decoder.single.rounds.drafter


def test_repetitions_are_linked_to_the_one_node_with_children_whose_last_tokens_are_the_same():
    nodes, drafter = linked()
    assert any(target in nodes.path(node) for node, target in drafter._same.items())
    for node, original in drafter._same.items():
        assert drafter._run(node) == drafter._run(original) and original < nodes.num_drafted
        assert drafter._occurrences[drafter._run(node)] == original != node
        level = [n for n in range(nodes.num_drafted) if nodes.depth[n] == nodes.depth[original]]
        alike = [n for n in level if drafter._run(n) == drafter._run(original)]
        assert original == max(alike, key=drafter._joint.get)


def test_a_graph_drafts_fewer_tokens_and_verifies_as_deep():
    """On the same text: the greedy output is the tree's, fewer tokens are drafted, and copies are
    among the accepted ones.
    """
    pair = tiny_pair(4)
    stop = stopping.FixedLength(6)
    warp = Warp(0)
    graph = papers.Graph(tau=1, max_verified=200, **GROWN)
    generations = {}
    for way in (papers.Tree(**GROWN), graph):
        out = SpeculativeDecoder(pair, way, stop, warp=warp, engine="eager").generate([0, 1, 2], 40)
        generations[type(way).__name__] = out
    tree_out = generations["Tree"]
    graph_out = generations["Graph"]
    assert tree_out.tokens.tolist() == graph_out.tokens.tolist()
    assert graph_out.stats.num_drafted < 0.5 * tree_out.stats.num_drafted
    copies = 0
    for record in graph_out.rounds:
        assert record.num_discarded >= 0
        copies += record.num_drafted - record.num_discarded < record.num_accepted
    assert copies > 0
