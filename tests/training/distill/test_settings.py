"""What a distillation refuses before models are loaded, and what follows from its settings."""

import pytest

from specheads import UserError
from specheads.pair.initial_draft import NewFeatureDraft, TargetLayers
from specheads.training.distill.settings import Distillation

MISTAKES = [
    ({"samples": "both"}, "samples=both must be one of 'text' or 'target'"),
    ({"divergence": "kl"}, "loss.divergence=kl must be one of 'auto', 'total_variation' or 'forw"),
    ({"init_layers": "all"}, "init_layers=all must be"),
    ({"init_layers": [0, -1]}, "init_layers=.*must be"),
    ({"target_probs_budget": -1}, "target_probs_budget=-1 must be a finite number of at least 0"),
    ({"gradient_checkpointing": "some"}, "gradient_checkpointing=some must be true or false"),
    ({"optimizer": {"lr": float("inf")}}, "optimizer.lr=inf must be a finite number above 0"),
    ({"draft_kind": "eagle"}, "draft_kind=eagle must be one of 'stand_alone', 'eagle3'"),
    ({"num_steps": 0}, "eagle3.steps=0 must be a positive integer"),
    ({"step_decay": 0}, "eagle3.step_decay=0 must be a finite number above 0"),
    ({"target_layers": [1, -1]}, "eagle3.target_layers=.*must be"),
    (
        {"draft_kind": "eagle3", "init_layers": [0, 1]},
        r"init_layers=\[0,1\] makes a stand-alone draft .*leave out one of them",
    ),
    (
        {"draft_kind": "eagle3.1", "stored_dtype": "int8"},
        "stored_dtype=int8 is of stand-alone drafts.*use bfloat16",
    ),
    (
        {"draft_kind": "eagle3.1", "form": "safeailab"},
        "eagle3.format=safeailab has no norms of draft_kind=eagle3.1; use draft_kind=eagle3",
    ),
    ({"num_dev_prompts": 0}, "validation.num_prompts=0 must be a positive integer"),
    (
        {"trainer": {"precision": "bf16-true"}},
        "trainer.precision=bf16-true must be one of '32-true'",
    ),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_refused_with_its_key_and_what_was_expected(given, message):
    with pytest.raises(UserError, match=message):
        Distillation(**given)


def test_the_kind_decides_the_initial_draft():
    kind = Distillation(draft_kind="eagle3.1", target_layers=[1, 3], seed=4)
    assert kind.initial_draft == NewFeatureDraft("eagle3.1", (1, 3), 4) and kind.makes_draft
    assert Distillation(init_layers=2).makes_draft and not Distillation().makes_draft


def test_the_draft_decides_the_loss_and_the_learning_rate_that_are_left_open():
    alone = Distillation().for_draft(256)
    reading = Distillation().for_draft(256, reads_target=True)
    assert (alone.divergence, reading.divergence) == ("total_variation", "forward_kl")
    assert reading.optimizer.lr > 2 * alone.optimizer.lr
    given = Distillation(divergence="total_variation", optimizer={"lr": 0.01})
    assert given.for_draft(256, reads_target=True) == given


def test_layers_decide_the_initial_draft():
    assert Distillation().initial_draft is None
    assert Distillation(init_layers=2).initial_draft == TargetLayers(2)
    assert Distillation(init_layers=[0, 5]).initial_draft == TargetLayers((0, 5))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_dev_prompts": 3},
        {"checkpoint_steps": 3},
        {"gradient_checkpointing": True},
        {"target_probs_budget": 0},
    ],
    ids=str,
)
def test_settings_that_change_no_number_do_not_keep_a_run_from_being_resumed(changes):
    assert Distillation(**changes).cache_key() == Distillation().cache_key()
