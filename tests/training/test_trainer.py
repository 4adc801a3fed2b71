"""What a training config asks for, without training."""

import pytest
import torch

from specheads import UserError
from specheads.commands.compose import command_config, settings_of
from specheads.training.heads.settings import HeadTraining
from specheads.training.trainer import fast_products


def specs(nano, *overrides):
    return settings_of(HeadTraining, command_config("train", ["model=nano", *overrides])).specs(
        nano
    )


def test_one_head_of_each_kind_unless_lists_are_given(nano):
    assert [spec.name for spec in specs(nano)] == ["next_token-d3-r1", "input_token-d3-r6"]
    (spec,) = specs(nano, "heads=lookahead")
    assert (spec.name, spec.config.depth, spec.reject_weight) == ("next_token-d3-r1", 3, 1)
    assert spec.config.draft["revision"] == nano.draft_revision
    (spec,) = specs(nano, "heads=specdecpp", "loss.reject_weight=2")
    assert (spec.name, spec.config.predicts, spec.reject_weight) == (
        "input_token-d3-r2",
        "input_token",
        2,
    )


def test_the_papers_grid_is_twenty_heads(nano):
    heads = specs(nano, "experiment=specdecpp_grid")
    assert {(spec.config.depth, spec.reject_weight) for spec in heads} == {
        (d, w) for d in range(5) for w in (1, 3, 6, 12)
    }
    assert len(heads) == len({spec.name for spec in heads}) == 20
    assert {spec.config.predicts for spec in heads} == {"input_token"}


def test_differences_are_part_of_the_name(nano):
    heads = specs(
        nano,
        "heads=lookahead",
        "head.depth=[0,1]",
        "head.width=[8,16]",
        "loss.reject_weight=[1,2.5]",
    )
    assert len({spec.name for spec in heads}) == 8
    assert (
        heads[-1].name == "next_token-d1-r2_5-w16"
        and heads[-1].config.width == 16
        and heads[-1].reject_weight == 2.5
    )
    heads = specs(nano, "heads=lookahead", "head.inputs=[[hidden],[hidden,entropy]]")
    assert [spec.config.inputs for spec in heads] == [("hidden",), ("hidden", "entropy")]
    assert heads[-1].name == "next_token-d3-r1-hidden+entropy"
    assert specs(nano, "heads=lookahead", "head.inputs=[hidden,entropy]")[0].config.inputs == (
        "hidden",
        "entropy",
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head.depth=[]", r"head.depth=\[\] names no value"),
        ("head.depth=[1,1]", "same head is asked for twice"),
        ("head.depth=[0,-1]", "head.depth=-1 must be a non-negative integer"),
        ("loss.reject_weight=[1,a]", "loss.reject_weight=a must be a finite number above 0"),
        ("heads=[lookahead,specdecpp]", "heads=.*must be one of"),
        ("head.inputs=[[hidden],entropy]", "head.inputs=.*mixes names and lists"),
    ],
)
def test_an_impossible_grid_is_refused(nano, override, message):
    with pytest.raises(UserError, match=message):
        specs(nano, override)


def test_float32_products_are_fast_on_a_gpu_in_half_precision_alone():
    before = torch.get_float32_matmul_precision()
    for precision, device_type, expected in (
        ("bf16-mixed", "cuda", "high"),
        ("32-true", "cuda", before),
        ("bf16-mixed", "cpu", before),
    ):
        with fast_products(precision, device_type):
            assert torch.get_float32_matmul_precision() == expected
        assert torch.get_float32_matmul_precision() == before != "high"
