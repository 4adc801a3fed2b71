"""The heads that settings describe: the defaults of each kind, those of a pair, and a head for each
combination of lists.
"""

import pytest
from fakes import tiny_pair

from specheads.errors import UserError
from specheads.training.heads.settings import HeadTraining, checked_share


def names(**settings):
    return [spec.name for spec in HeadTraining(**settings).specs()]


def test_each_kind_has_the_weight_and_the_texts_of_its_source():
    """The paper's heads weigh rejections sixfold and learn from texts that keep 15 % of the
    target's tokens.
    """
    both = HeadTraining()
    assert [(spec.name, spec.reject_weight) for spec in both.specs()] == [
        ("lookahead-d3-r1", 1.0),
        ("specdecpp-d3-r6", 6.0),
    ]
    assert [(kind.heads, kind.predicts, kind.response_share) for kind in both.kinds()] == [
        ("lookahead", "next_token", 1.0),
        ("specdecpp", "input_token", 0.15),
    ]
    inputs = [spec.config.inputs for spec in both.specs()]
    assert inputs == [("hidden", "embedding", "draft_prob", "max_prob", "entropy"), ("hidden",)]
    assert HeadTraining(heads="lookahead").kinds() == [HeadTraining(heads="lookahead")]


def test_lists_make_a_head_of_each_combination_named_by_what_differs():
    shape = {"depth": [0, 2], "width": [8, 12], "inputs": [["hidden"], ["entropy", "max_prob"]]}
    made = HeadTraining(heads="lookahead", head=shape, reject_weight=[1, 2.5]).specs()
    assert len(made) == 16 and [spec.name for spec in made[:3]] == [
        "lookahead-d0-r1-w8-hidden",
        "lookahead-d0-r2_5-w8-hidden",
        "lookahead-d0-r1-w8-entropy+max_prob",
    ]
    last = made[-1]
    assert (last.name, last.config.depth, last.config.width) == (
        "lookahead-d2-r2_5-w12-entropy+max_prob",
        2,
        12,
    )
    assert last.config.inputs == ("entropy", "max_prob") and last.reject_weight == 2.5
    assert names(heads="lookahead", head={"width": 12, "inputs": ["hidden"]}) == ["lookahead-d3-r1"]
    assert names(heads="specdecpp", head={"depth": 1}, reject_weight=3) == ["specdecpp-d1-r3"]


def test_a_head_has_the_sizes_of_its_pair_and_names_both_models():
    pair = tiny_pair(vocab_size=8)
    spec = HeadTraining(heads="lookahead", warp={"temperature": 0.5}).specs(pair)[0]
    config = spec.config
    embedded = pair.draft.get_input_embeddings().weight.shape[1]
    assert (config.hidden_size, config.embedding_size, config.vocab_size) == (
        pair.draft_lm.hidden_size,
        embedded,
        8,
    )
    assert config.draft == pair.origin("draft") != pair.origin("target") == config.target
    assert config.warp["temperature"] == 0.5
    assert [each.config.vocab_size for each in HeadTraining().specs(pair)] == [8, 8]
    without = HeadTraining(heads="lookahead").specs()[0].config
    assert (without.hidden_size, without.embedding_size, without.vocab_size, without.draft) == (
        1,
        1,
        None,
        {},
    )


@pytest.mark.parametrize(
    ("predicts", "usual", "largest"), [("input_token", 0.15, 0.99), ("next_token", 1.0, 1)]
)
def test_a_share_of_response_tokens_is_checked_by_kind(predicts, usual, largest):
    assert checked_share(predicts, None) == usual
    assert [checked_share(predicts, share) for share in (0, 0.5, largest)] == [0, 0.5, largest]
    for share in (-0.01, largest + 0.005):
        with pytest.raises(UserError) as error:
            checked_share(predicts, share)
        assert (
            str(error.value)
            == f"mixing.response_share={share} must be a number from 0 to {largest:g} for"
            f" {predicts} heads, for example 0.15."
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"heads": "lookahead", "head": {"depth": []}},
            "head.depth=[] names no value; give one, or several.",
        ),
        (
            {"heads": "lookahead", "head": {"depth": [1, 1]}},
            "the same head is asked for twice; give each value of each setting once.",
        ),
        (
            {"head": {"inputs": ["embedding"]}},
            (
                "head.inputs names 'embedding'; a head with predicts=input_token can read hidden,"
                " max_prob, entropy, second_prob, depth."
            ),
        ),
        (
            {"mixing": {"response_share": 2}},
            "mixing.response_share=2 must be a number from 0 to 1 for next_token heads",
        ),
        (
            {"head": {"inputs": ["hidden", ["hidden"]]}},
            " mixes names and lists; give a list of names, or a list of such lists;",
        ),
    ],
)
def test_a_mistake_is_one_message(settings, message):
    with pytest.raises(UserError) as error:
        HeadTraining(**settings)
    assert message in str(error.value) and (
        str(error.value) == message or not message.endswith(".")
    )


def test_the_share_of_each_kind_decides_results_and_the_shape_of_heads_does_not():
    key = "mixing.response_share"
    assert (
        HeadTraining().cache_key()[key] == [1.0, 0.15]
        and HeadTraining(heads="specdecpp").cache_key()[key] == 0.15
    )
    assert HeadTraining(heads="specdecpp", mixing={"response_share": 0.5}).cache_key()[key] == 0.5
    assert HeadTraining(mixing={"num_mixes": 3}).cache_key()["mixing.num_mixes"] == [1, 3]
    assert HeadTraining(head={"depth": 1}).cache_key() == HeadTraining().cache_key()
    assert {"seed", "trainer.max_epochs", "optimizer.lr"} <= HeadTraining().cache_key().keys()
