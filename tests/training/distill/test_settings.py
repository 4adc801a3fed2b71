"""What a distillation refuses before models are loaded, and what follows from its settings."""

import pytest

from specheads import UserError
from specheads.settings import cache_key, fields_of
from specheads.training.distill.distill_loss import DIVERGENCES
from specheads.training.distill.initial_draft import RandomDraft, TargetLayers
from specheads.training.distill.settings import Distillation, DistillLoss, Mixture

MISTAKES = [
    ({"samples": "both"}, "samples=both must be one of 'text', 'target', 'on_policy' or 'mixed'"),
    ({"mixed": {"own": 1}}, "mixed.own=1 is not known; expected one of text, target, on_policy"),
    ({"mixed": {"text": -1}}, "mixed.text=-1 must be a finite number of at least 0"),
    ({"mixed": {"text": float("inf")}}, "mixed.text=inf must be a finite number"),
    ({"mixed": "half"}, "mixed=half must be a set of keys"),
    ({"samples": "mixed", "mixed": {"target": 0, "on_policy": 0}}, "samples=mixed: all shares are 0"),
    ({"refresh_every": 0}, "refresh_every=0 must be a positive integer"),
    ({"loss": {"divergence": "kl"}}, "loss.divergence=kl must be one of 'forward_kl'"),
    ({"loss": {"beta": 1}}, "loss.beta=1 must be a number above 0 and below 1"),
    ({"loss": {"temperature": 0}}, "loss.temperature=0 must be a finite number above 0"),
    ({"loss": {"hard_weight": -1}}, "loss.hard_weight=-1 must be a finite number of at least 0"),
    ({"loss": {"token_share": 0}}, "loss.token_share=0 must be a number above 0 and at most 1"),
    ({"loss": {"gamma": 1}}, "loss.gamma=1 is not known; expected one of divergence, beta"),
    ({"loss": {"token_share": 0.5}}, "loss.token_share=0.5 and reference=null go together"),
    ({"reference": "folder"}, "loss.token_share=1.0 and reference=folder go together"),
    ({"init": "nothing"}, "init=nothing must be one of 'draft', 'layers' or 'fresh'"),
    ({"init": "fresh"}, "init=fresh needs init_config"),
    ({"init_layers": 2}, "init_layers=2 is for init=layers, but init=draft"),
    ({"init_config": {"hidden_size": 8}}, "init_config=.* is for init=fresh, but init=draft"),
    ({"init": "fresh", "init_config": "small"}, "init_config=small must be a set of keys"),
    ({"init": "layers", "init_layers": [0, -1]}, "init_layers=.*must be"),
    ({"target_probs": {"keep": "always"}}, "target_probs.keep=always must be one of 'auto', 'cached' or 'recomputed'"),
    ({"target_probs": {"top_k": 0}}, "target_probs.top_k=0 must be a positive integer"),
    ({"target_probs": {"budget": -1}}, "target_probs.budget=-1 must be a finite number of at least 0"),
    ({"target_probs": None}, "target_probs=null must be a set of keys"),
    ({"gradient_checkpointing": "some"}, "gradient_checkpointing=some must be true or false"),
    ({"optimizer": {"lr": float("inf")}}, "optimizer.lr=inf must be a finite number above 0"),
    ({"validation": {"num_prompts": 0}}, "validation.num_prompts=0 must be a positive integer"),
    ({"validation": {"live_prompts": -1}}, "validation.live_prompts=-1 must be a non-negative integer"),
    ({"trainer": {"precision": "bf16-true"}}, "trainer.precision=bf16-true must be one of '32-true'.*lose small steps"),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_refused_with_its_key_and_what_was_expected(given, message):
    with pytest.raises(UserError, match=message):
        Distillation(**given)


def test_every_key_has_a_sentence_of_help():
    assert [field.key for field in fields_of(Distillation) if not field.help] == []


def test_every_divergence_can_be_chosen():
    assert all(DistillLoss(divergence=name) for name in DIVERGENCES)


def test_shares_are_those_of_the_kinds_that_occur():
    assert Distillation().shares == {"target": 1.0} and Distillation(samples="text").shares == {"text": 1.0}
    mixed = Distillation(samples="mixed", mixed=Mixture(text=1, target=0, on_policy=3))
    assert mixed.shares == {"text": 0.25, "on_policy": 0.75}


def test_init_decides_the_initial_draft():
    assert Distillation().initial_draft is None
    assert Distillation(init="layers", init_layers=[0, 5]).initial_draft == TargetLayers((0, 5))
    fresh = Distillation(init="fresh", init_config={"hidden_size": 8}, seed=3)
    assert fresh.initial_draft == RandomDraft({"hidden_size": 8}, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"validation": {"num_prompts": 3}},
        {"checkpoint": {"every_steps": 3}},
        {"gradient_checkpointing": True},
        {"target_probs": {"keep": "recomputed"}},
        {"loader": {"num_workers": 3}},
        {"resume": False},
    ],
    ids=str,
)
def test_settings_that_change_no_number_do_not_keep_a_run_from_being_resumed(changes):
    assert cache_key(Distillation(**changes)) == cache_key(Distillation())
