"""Impossible settings of the papers' methods are one message each."""

import re

import pytest
from fakes import tiny_pair

from examples.new_draft import KnownText
from specheads import UserError, papers, stopping
from specheads.papers.mjsd import BlockSearch


def skip(layers):
    return papers.LayerSkip(layers).pair(tiny_pair(4))


WRONG = [
    (lambda: papers.Beam(0), "drafting.num_beams=0 must"),
    (lambda: papers.Multi(0), "drafting.num_chains=0 must"),
    (lambda: papers.Multi(merge=1), "drafting.merge=1 must be true or false"),
    (lambda: papers.Tree(theta_prob=2), "drafting.theta_prob=2 must be a number from 0 to 1"),
    (lambda: papers.Graph(top_k=0), "drafting.top_k=0 must be a positive integer"),
    (lambda: papers.Graph(tau=0), "drafting.tau=0 must be a positive integer"),
    (
        lambda: papers.Graph(max_nodes=80, max_verified=70),
        "drafting.max_verified=70 must be an integer of at least 80",
    ),
    (lambda: KnownText(max_ngram=0), "drafting.max_ngram=0"),
    (lambda: BlockSearch(tiny_pair(3), block=0), "block=0"),
    (lambda: BlockSearch(tiny_pair(3), beams=0.5), "beams=0.5"),
    (lambda: papers.JointVerification("x"), "verification.threshold=x must be a number from 0 to"),
    (lambda: papers.BigLittle(rollback=-1), "verification.rollback=-1"),
    (lambda: papers.BigLittle(fallback=1.5), "verification.fallback=1.5"),
    (lambda: papers.BigLittle(max_tokens=0), "verification.max_tokens=0"),
    (lambda: stopping.MaxProbability(1.5), "threshold=1.5"),
    (lambda: skip("1"), "skipped=1 must be a list; it is the numbers of layers, from 0"),
    (lambda: skip([0.5]), "skipped=[0.5] must be a non-negative integer"),
    (lambda: skip([1, 1]), "must name at least one layer, and each layer once"),
    (lambda: skip([]), "must name at least one layer, and each layer once"),
    (lambda: skip([2]), "names layer 2, but LlamaForCausalLM has layers 0 to 1"),
    (lambda: skip([0, 1]), "leaves out all 2 layers"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_an_impossible_setting_is_a_message(make, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make()
