"""What a machine's memory decides for a distillation; the GPU is a stand-in."""

from dataclasses import replace

import pytest
import torch

from specheads import UserError
from specheads.pair.config import PairConfig
from specheads.training.distill import memory as memory_plan
from specheads.training.distill.memory import (
    ModelSizes,
    Plan,
    check_config,
    chosen_precision,
    forecast_of,
    is_sharded,
    may_leave,
    plan_of,
)
from specheads.training.distill.settings import Distillation
from tests.fakes import tiny_llama, tiny_pair

CPU = torch.device("cpu")


@pytest.fixture
def pair():
    """A draft of eight layers, which takes less memory if they run again."""
    return replace(tiny_pair(), draft=tiny_llama(3, seed=2, layers=8))


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that gives the stand-in a number of bytes."""
    return lambda usable: monkeypatch.setattr(memory_plan, "usable_memory", lambda device: usable)


@pytest.mark.parametrize(
    ("dtype", "device_type", "expected"),
    [
        (torch.float32, "cuda", "bf16-mixed"),
        (torch.float16, "cuda", "bf16-mixed"),
        (torch.bfloat16, "cuda", "bf16-mixed"),
        (torch.float64, "cuda", "32-true"),  # which leaves float64 as it is
        (torch.float32, "cpu", "32-true"),
        (torch.bfloat16, "cpu", "bf16-mixed"),
        (torch.float32, "mps", "32-true"),
    ],
)
def test_the_precision_is_that_of_the_device(dtype, device_type, expected):
    assert chosen_precision("auto", dtype, device_type) == expected
    assert chosen_precision("16-mixed", dtype, device_type) == "16-mixed"


def test_nothing_is_planned_on_a_cpu(nano):
    assert memory_plan.usable_memory(CPU) is None
    assert plan_of(nano, Distillation(), 600, can_store=True) == Plan()
    assert plan_of(nano, Distillation(gradient_checkpointing=True), 600, can_store=True) == Plan(gradient_checkpointing=True)


def test_the_plan_of_a_pair_is_that_of_its_sizes(pair, gpu):
    settings = Distillation(loader={"batch_size": 4})
    forecast = forecast_of(pair.draft, pair.target, settings, 100, CPU)
    assert forecast.draft == ModelSizes.of(pair.draft) and (forecast.batch.num_texts, forecast.batch.num_tokens) == (4, 100)
    assert forecast.target > 8 * sum(weight.numel() for weight in pair.target.parameters()) and forecast.reference == 0
    with_reference = Distillation(reference="folder", loss={"token_share": 0.5})
    assert forecast_of(pair.draft, pair.target, with_reference, 100, CPU).reference == 8 * forecast.draft.num_weights
    gpu(forecast.training(Plan()).total)
    assert plan_of(pair, settings, 100, can_store=True) == Plan()
    gpu(forecast.training(Plan()).total - 1)
    assert plan_of(pair, settings, 100, can_store=True) == Plan(target_leaves=True)
    again = Plan(gradient_checkpointing=True)
    assert plan_of(pair, settings, 100, can_store=False) == again
    assert plan_of(pair, settings.but(samples="on_policy"), 100, can_store=True) == again
    assert plan_of(pair, settings.but(target_probs={"keep": "recomputed"}), 100, can_store=True) == again
    assert plan_of(pair, settings.but(trainer={"strategy": "fsdp"}), 100, can_store=True) == Plan()


def test_a_target_that_is_spread_stays(pair, gpu, monkeypatch):
    gpu(forecast_of(pair.draft, pair.target, Distillation(), 100, CPU).training(Plan()).total - 1)
    monkeypatch.setattr(pair.target, "hf_device_map", {"": 0}, raising=False)  # as accelerate leaves it
    assert plan_of(pair, Distillation(), 100, can_store=True) == Plan(gradient_checkpointing=True)


def test_what_may_leave_and_what_is_sharded():
    assert may_leave(Distillation()) and not may_leave(Distillation(samples="mixed"))
    assert is_sharded(Distillation(trainer={"strategy": "deepspeed_stage_3"}))
    assert not is_sharded(Distillation()) and not is_sharded(Distillation(trainer={"strategy": "ddp"}))


@pytest.mark.parametrize(
    ("init", "num_layers"),
    [({}, 2), ({"init": "layers", "init_layers": 1}, 1), ({"init": "fresh", "init_config": {"num_hidden_layers": 3}}, 3)],
    ids=["draft", "layers", "fresh"],
)
def test_configs_are_checked_without_weights(init, num_layers, gpu, monkeypatch):
    """The refusal names the number of the draft's weights, and the window limits the texts."""
    monkeypatch.setattr("specheads.pair.language_model.load_model", lambda *args, **keys: pytest.fail("a model was loaded"))
    config, settings = PairConfig(draft="synthetic:tiny", target="synthetic:tiny", device="cpu"), Distillation(**init)
    gpu(10**12)
    check_config(config, settings, 10**6)
    gpu(1)
    num_weights = 2 * 256 * 64 + num_layers * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    message = rf"for {num_weights / 1e6:.1f} M weights .*activations of 16 texts of 2,048 tokens .*for the target = "
    with pytest.raises(UserError, match=message):
        check_config(config, settings.but(target_probs={"keep": "recomputed"}), 10**6)
