"""The arithmetic of a distillation's memory: against what autograd keeps and published sizes; what is decided with it."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM

from specheads import UserError
from specheads.pair.synthetic import synthetic_model
from specheads.training.distill.memory import GIB, Batch, Forecast, Memory, ModelSizes, Plan, arithmetic, planned

GB80 = 0.9 * 79 * GIB  # what can be used of a GPU of 80 GB


def sizes(name):
    return ModelSizes.of(synthetic_model(f"synthetic:{name}", "auto", "meta"))


def forecast(num_tokens=1536, precision="bf16-mixed", device_type="cuda", draft="llama3.2-1b", target=0):
    return Forecast(sizes(draft), Batch(16, num_tokens), precision, device_type, target)


TARGET = 2 * sizes("llama3.1-8b").num_weights + sizes("llama3.1-8b").reading_bytes(2)


def kept_bytes(num_layers, key_value_heads, half):
    """Return the bytes of all tensors that a Llama keeps for the gradient, without the weights, and its sizes."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        head_dim=24,
    )
    model = LlamaForCausalLM(config)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too, so that its address is not used again
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=half):
        model.base_model(input_ids=torch.zeros((3, 40), dtype=torch.long), use_cache=False)
    return sum(size for size, _ in kept.values()), ModelSizes.of(model)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "mixed"])
@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_a_layer_keeps_the_bytes_that_are_forecast(half, key_value_heads):
    (two, more), (one, fewer) = (kept_bytes(layers, key_value_heads, half) for layers in (2, 1))
    copies = 2 * (more.num_weights - fewer.num_weights - 2 * 64) if half else 0  # of all weights but those of the two norms
    assert two - one == copies + 3 * 40 * more.layer_bytes(half)


def test_sizes_are_those_of_the_published_models():
    small, seven = sizes("llama3.2-1b"), sizes("llama2-7b")
    assert (small.num_weights, seven.num_weights) == (1_235_814_400, 6_738_415_616)
    assert (small.query_size, small.key_value_size) == (2048, 512)
    assert small.has_grouped_queries and not seven.has_grouped_queries


@pytest.mark.parametrize(("num_tokens", "gigabytes"), [(600, 23.6), (1536, 154.6)])
def test_in_float32_grouped_queries_keep_all_attention_scores_on_cuda(num_tokens, gigabytes):
    """16 texts, 16 layers of 32 heads, two copies of 4 bytes: 24 and 150 GB."""
    full = forecast(num_tokens, "32-true")
    scores = 16 * 16 * num_tokens * full.draft.scores_bytes(num_tokens)
    assert scores == 2 * 4 * 16 * 16 * 32 * num_tokens**2 and round(scores / 1e9, 1) == gigabytes
    without = full.training(Plan()).activations - scores
    assert without == forecast(num_tokens, "32-true", "cpu").training(Plan()).activations
    assert not forecast(num_tokens).keeps_scores and not forecast(precision="32-true", draft="llama2-7b").keeps_scores


def test_half_precision_and_checkpointing_take_less():
    half, full = forecast().training(Plan()), forecast(precision="32-true", device_type="cpu").training(Plan())
    assert half.activations < 0.7 * full.activations and (half.copies, full.copies) == (2 * 1_235_814_400, 0)
    again = forecast().training(Plan(gradient_checkpointing=True))
    assert replace(again, activations=0) == replace(half, activations=0)
    # The inputs of 16 layers, and a layer twice for the 8,192 tokens that are read together.
    assert again.activations == 16 * 1536 * 16 * 4 * 2048 + 2 * 8192 * forecast().draft.layer_bytes(True)


def test_validation_takes_the_target_and_no_activations():
    memory = forecast(target=TARGET).validation()
    assert (memory.activations, memory.copies, memory.target) == (0, 0, TARGET)
    assert memory.state == 16 * 1_235_814_400


@pytest.mark.parametrize(
    ("num_tokens", "usable", "can_leave", "expected"),
    [
        (600, GB80, True, Plan()),  # all of it fits
        (1536, GB80, True, Plan(target_leaves=True)),
        (1536, GB80, False, Plan(gradient_checkpointing=True)),
        (1536, 40 * GIB, True, Plan(gradient_checkpointing=True, target_leaves=True)),
    ],
)
def test_what_does_not_fit_is_given_up_in_order(num_tokens, usable, can_leave, expected):
    assert planned(forecast(num_tokens, target=TARGET), usable, can_leave) == expected


def test_every_plan_is_the_first_that_fits():
    """At the exact size of each plan it is taken, and with one byte less the next."""
    cast = forecast(target=TARGET)
    plans = [Plan(), Plan(target_leaves=True), Plan(gradient_checkpointing=True)]
    for plan in plans:
        assert planned(cast, cast.training(plan).total, can_leave=True) == plan
        assert planned(cast, cast.training(plan).total - 1, can_leave=True) != plan


def test_what_is_asked_for_is_kept():
    assert planned(forecast(), GB80, True, gradient_checkpointing=True) == Plan(gradient_checkpointing=True)
    with pytest.raises(UserError, match="does not fit the GPU"):
        planned(forecast(target=TARGET), GB80, can_leave=False, gradient_checkpointing=False)


def test_a_draft_that_fits_alone_but_not_next_to_the_target_is_refused():
    """The target comes back for validation."""
    small = forecast(100, target=60 * 10**9)
    assert small.training(Plan(target_leaves=True)).total < 60 * 10**9 < small.validation().total
    with pytest.raises(UserError, match=r"55\.9 GiB for the target"):
        planned(small, 65e9, can_leave=True)


def test_a_refusal_has_the_sum():
    with pytest.raises(UserError) as error:
        planned(forecast(draft="llama2-7b"), GB80, can_leave=True)
    assert str(error.value).startswith(
        "training the draft does not fit the GPU: 100.4 GiB for 6.74 billion weights with gradients and AdamW's state, 16 bytes "
        "each + 12.6 GiB for their copies in half precision + "
    )
    assert "activations of 16 texts of 1,536 tokens in bf16-mixed with gradient checkpointing" in str(error.value)
    assert "71.1 GiB can be used" in str(error.value)


def test_the_parts_add_up():
    memory = Memory(state=GIB, loss=2 * GIB)
    assert memory.total == 3 * GIB
    assert arithmetic(forecast(), memory, Plan()).endswith("+ 2.0 GiB for the loss = 3.0 GiB")
