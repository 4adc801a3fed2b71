"""What a training config asks for, without training."""

import torch

from specheads.commands.compose import command_config, settings_of
from specheads.training.heads.settings import HeadTraining
from specheads.training.trainer import fast_products


def test_the_grid_of_specdecpp_is_twenty_heads(nano):
    cfg = command_config("train", ["model=nano", "experiment=specdecpp_grid"])
    heads = settings_of(HeadTraining, cfg).specs(nano)
    assert {(spec.config.depth, spec.reject_weight) for spec in heads} == {
        (d, w) for d in range(5) for w in (1, 3, 6, 12)
    }
    assert len(heads) == len({spec.name for spec in heads}) == 20
    assert {spec.config.predicts for spec in heads} == {"input_token"}


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
