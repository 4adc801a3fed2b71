"""The arithmetic of a distillation's memory, against what autograd keeps, and what is decided with it; the GPU is a stand-in."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM

from specheads import UserError
from specheads.pair.config import PairConfig
from specheads.pair.synthetic import synthetic_model
from specheads.training.distill import memory
from specheads.training.distill.memory import GIB, check_config, chosen_precision, layers_run_again, needs_of, runs_again
from specheads.training.distill.settings import Distillation
from tests.fakes import tiny_llama, tiny_pair

CPU = torch.device("cpu")
GB80 = 0.9 * 79 * GIB  # what can be used of a GPU of 80 GB


@pytest.fixture
def pair():
    """A draft of eight layers, which takes less memory if they run again."""
    return replace(tiny_pair(), draft=tiny_llama(3, seed=2, layers=8))


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that gives the stand-in a number of bytes."""
    return lambda usable: monkeypatch.setattr(memory, "usable_memory", lambda device, settings: usable)


def needs(num_tokens, **settings):
    """What 16 texts take with a draft of 1B and a target of 8B."""
    draft, target = (synthetic_model(f"synthetic:{name}", "auto", "meta") for name in ("llama3.2-1b", "llama3.1-8b"))
    return needs_of(draft, target, Distillation(**settings), num_tokens, torch.device("cuda"))


def kept_bytes(num_layers, half):
    """Return the bytes of all tensors that a Llama keeps for the gradient, without the weights, and those of its weights."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=160, num_hidden_layers=num_layers, num_attention_heads=4
    )
    model, kept = LlamaForCausalLM(config), {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too, so that its address is not used again
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=half):
        model.base_model(input_ids=torch.zeros((3, 40), dtype=torch.long), use_cache=False)
    return sum(size for size, _ in kept.values()), sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("half", [False, True], ids=["float32", "mixed"])
def test_a_layer_keeps_at_most_the_bytes_that_are_counted(half):
    (two, more), (one, fewer) = (kept_bytes(layers, half) for layers in (2, 1))
    copies = 2 * (more - fewer) if half else 0  # of a layer's weights
    counted = 3 * 40 * (35 * 64 + 8 * 160 if half else 41 * 64 + 16 * 160)
    assert 0.95 * counted < two - one - copies <= counted


@pytest.mark.parametrize(
    ("dtype", "device_type", "expected"),
    [
        (torch.float32, "cuda", "bf16-mixed"),
        (torch.float16, "cuda", "bf16-mixed"),
        (torch.float64, "cuda", "32-true"),  # which leaves float64 as it is
        (torch.float32, "cpu", "32-true"),
        (torch.bfloat16, "cpu", "bf16-mixed"),
        (torch.float32, "mps", "32-true"),
    ],
)
def test_the_precision_is_that_of_the_device(dtype, device_type, expected):
    assert chosen_precision("auto", dtype, device_type) == expected
    assert chosen_precision("16-mixed", dtype, device_type) == "16-mixed"


def test_half_precision_and_running_again_take_less():
    half, full = needs(1536), needs(1536, trainer={"precision": "32-true"})
    assert half.activations < 0.7 * full.activations and half.inputs < half.activations / 4
    assert needs(100).state > 18 * 1_235_814_400 and needs(100).target == 2 * 8_030_261_248


def test_layers_run_again_where_training_does_not_fit_otherwise():
    assert not runs_again(needs(600), GB80) and runs_again(needs(1536), GB80) and runs_again(needs(1536), 45 * GIB)
    parts = needs(1536)
    for choice in (False, True):  # at its exact size it is taken, and with one byte less it is not
        assert runs_again(parts, parts.total(choice)) == choice
    assert runs_again(parts, parts.total(False) - 1)


def test_what_is_asked_for_is_kept_and_what_does_not_fit_is_refused():
    assert runs_again(needs(100), GB80, True)
    with pytest.raises(UserError, match=r"does not fit the GPU: at least .* but 71\.1 GiB can be used.*fsdp2"):
        runs_again(needs(1536), GB80, False)
    with pytest.raises(UserError, match=r"55\.9 for the target"):
        runs_again(replace(needs(100), target=60 * 10**9), 65e9)


def test_what_is_chosen_for_a_pair_is_that_of_its_sizes(pair, gpu):
    assert layers_run_again(pair, Distillation(gradient_checkpointing=True), 100)
    settings = Distillation(loader={"batch_size": 4})
    parts = needs_of(pair.draft, pair.target, settings, 100, CPU)
    assert parts.target == 8 * sum(weight.numel() for weight in pair.target.parameters())
    gpu(parts.total(False))
    assert not layers_run_again(pair, settings, 100)
    gpu(parts.total(False) - 1)
    assert layers_run_again(pair, settings, 100)


@pytest.mark.parametrize("settings", [{}, {"trainer": {"strategy": "deepspeed_stage_3"}}])
def test_nothing_is_planned_on_a_cpu_and_for_a_draft_that_is_spread(settings):
    device = torch.device("cuda" if settings else "cpu")
    assert memory.usable_memory(device, Distillation(**settings)) is None


@pytest.mark.parametrize(
    "init",
    [{}, {"init_layers": 1}],
    ids=["draft", "layers"],
)
def test_configs_are_checked_without_weights(init, gpu, monkeypatch):
    monkeypatch.setattr("specheads.pair.language_model.load_model", lambda *args, **keys: pytest.fail("a model was loaded"))
    config, settings = PairConfig(draft="synthetic:tiny", target="synthetic:tiny", device="cpu"), Distillation(**init)
    gpu(10**12)
    check_config(config, settings, 10**6)
    gpu(1)
    with pytest.raises(UserError, match="training the draft does not fit the GPU"):
        check_config(config, settings, 10**6)
