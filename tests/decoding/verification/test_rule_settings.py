"""What rules are built from: defaults, refusals in full, compile keys, and the device that they
compute on.
"""

import pytest
import torch
import yaml
from draftings import RULES

from specheads import UserError, Warp
from specheads.decoding.rounds import VerifyStep
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping import FixedLength, OnlineLogistic
from specheads.decoding.verification import SyntheticVerification
from specheads.pair.config import config_folder
from specheads.papers import BiasedVerification
from specheads.papers.trees.verification import Draft, TreeBlock, TreeVerification

# By name: other settings than the defaults.
OTHER = {
    "biased": [{"eps": 0.2}, {"mode": "uno"}],
    "big_little": [{"fallback": 0.8}, {"rollback": 1.0}],
    "joint": [{"threshold": 0.2}],
    "synthetic": [{"rate": 0.7}],
}
META = torch.device("meta")  # tensors without numbers, which cannot be mixed with those of the CPU


@pytest.mark.parametrize("name", RULES)
def test_defaults_are_those_of_the_config(name):
    config = yaml.safe_load((config_folder() / "verification" / f"{name}.yaml").read_text())
    made = RULES[name](**{key: value for key, value in config.items() if key != "_target_"})
    default = RULES[name]()
    assert vars(made).keys() == vars(default).keys() and made.label == default.label
    for key in vars(default).keys() - {"stopping"}:
        assert getattr(made, key) == getattr(default, key)
    if default.stopping is not None:
        assert default.stopping.compile_key == made.stopping.compile_key
        assert (default.stopping.threshold, default.stopping.max_tokens) == (
            made.stopping.threshold,
            made.stopping.max_tokens,
        )


def test_rules_are_compiled_together_only_if_they_decide_alike():
    made = [RULES[name](**settings) for name in RULES for settings in ({}, *OTHER.get(name, ()))]
    keys = [rule.compile_key for rule in made]
    assert len({*keys}) == len(made) and None not in keys
    assert [RULES[name]().compile_key for name in RULES] == [
        RULES[name]().compile_key for name in RULES
    ]
    memory = DraftMemory(4, 3, torch.float32, torch.device("cpu"))
    steps = [
        VerifyStep(warp, rule, memory, stopping).compile_key
        for rule in made
        for warp in (Warp(), Warp(0))
        for stopping in (FixedLength(), OnlineLogistic())
    ]
    assert len({*steps}) == len(steps) and None not in steps


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BiasedVerification(1.5),
            (
                "verification.eps=1.5 must be a number from 0 to 1; "
                "it is the margin added to the target's probability, for example 0.1."
            ),
        ),
        (
            lambda: BiasedVerification(0.1, "best"),
            "verification.mode=best must be one of 'opt' or 'uno'; it is what follows a rejection.",
        ),
        (
            lambda: SyntheticVerification(2),
            "verification.rate=2 must be a number from 0 to 1; "
            + "it is the probability that a drafted token is accepted, for example 0.8.",
        ),
    ],
)
def test_refusals_name_the_setting_its_value_and_what_it_is(make, message):
    with pytest.raises(UserError) as raised:
        make()
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "name", [name for name, rule in RULES.items() if issubclass(rule, TreeVerification)]
)
def test_trees_are_verified_on_the_device_of_the_targets_distributions(name):
    draft = Draft(draft_probs=torch.full((7, 3), 1 / 3))
    for parent, token in ((-1, 0), (0, 1), (0, 2), (-1, 1), (3, 1), (-1, 0)):
        draft.add(parent, token)
    block = TreeBlock.of(draft, torch.empty(7, 3, device=META))
    uniforms = torch.empty(3, dtype=torch.float64, device=META)
    path, next_token = RULES[name]().distribution(block).decide(uniforms[:2], uniforms[2:])
    assert path.device == next_token.device == META
