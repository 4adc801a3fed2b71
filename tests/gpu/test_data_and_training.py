"""Responses, labels, features and training steps on the device are those on the CPU, in float64 up
to the rounding of sums.
"""

import copy

import numpy as np
import pytest
import torch
from fakes import tiny_pair
from feature_drafts import reading_pair

from specheads import HeadConfig, Warp
from specheads.data_gen.shard_rows import label_responses
from specheads.decoding.responses import Responder
from specheads.heads.batch import HeadBatch, head_features
from specheads.prompts.prompt import ResponseLimits
from specheads.training.heads.bank import HeadBank
from specheads.training.heads.settings import HeadSpec
from tests.gpu.checks import ENGINES, moved, random_prompt, with_angles_of_the_cpu

VOCAB = 12
WARPS = [Warp(0), Warp(0.7, top_k=5), Warp(1.0, top_p=0.8)]
NUM_TOKENS = 12
CPU = torch.device("cpu")


@pytest.fixture
def pairs(device):
    """The same pair on the CPU and on the device."""
    return tiny_pair(VOCAB, scale=2.0), moved(tiny_pair(VOCAB, scale=2.0), device)


@pytest.fixture(params=["alone", "reads its target"])
def exact_pairs(request, pairs):
    """These with the same rotary angles, and the same with a draft that reads its target."""
    if request.param != "alone":
        pairs = [reading_pair(pair) for pair in pairs]
    return pairs[0], with_angles_of_the_cpu(pairs[1])


@pytest.fixture(scope="module")
def texts():
    prompts = [random_prompt(3 + 2 * seed, seed, VOCAB) for seed in range(6)]
    return prompts, [random_prompt(NUM_TOKENS - seed, 10 + seed, VOCAB) for seed in range(6)]


def uniforms(*shape):
    return np.random.default_rng(0).random(shape)


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_responses(pairs, texts, engine, warp):
    made = []
    for pair, name in zip(pairs, ("eager", engine), strict=True):
        limits = ResponseLimits(NUM_TOKENS, batch_size=3)
        responder = Responder(pair, [len(prompt) for prompt in texts[0]], limits, engine=name)
        made.append(
            [
                response.ids
                for response in responder.respond(texts[0], uniforms(6, NUM_TOKENS), warp)
            ]
        )
    assert made[0] == made[1]
    assert all(len(ids) == NUM_TOKENS for ids in made[0])


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_labels(exact_pairs, texts, warp):
    here, there = (
        label_responses(pair, *texts, uniforms(6, 3, NUM_TOKENS), warp) for pair in exact_pairs
    )
    for expected, actual in zip(here, there, strict=True):
        assert (
            actual["draft_ids"] == expected["draft_ids"]
            and actual["more_draft_ids"] == expected["more_draft_ids"]
        )
        for name in expected:
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-9, atol=1e-12)


# --- heads


def head_batch():
    """Return texts with labels at all positions but the first two of each."""
    tokens = torch.tensor([random_prompt(10, seed, VOCAB) for seed in range(5)])
    row, index = (tokens >= 0).nonzero().T
    row = row[index > 1]
    index = index[index > 1]
    labels = torch.rand(len(row), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    depth = (index - 2).clamp_max(2)
    return HeadBatch(
        tokens, row, index, tokens[row, index], labels, committed=tokens.flip(0), depth=depth
    )


def specs(hidden_size):
    """Return three heads of different depths, one of which predicts the expected acceptance too."""
    configs = [HeadConfig(hidden_size, depth=depth) for depth in range(3)]
    return [
        HeadSpec(f"{config.depth} blocks", config, reject_weight=1.0 + config.depth)
        for config in configs
    ]


@pytest.mark.parametrize("predicts", ["input_token", "next_token"])
def test_features(exact_pairs, device, predicts):
    needs = frozenset(
        ["hidden", "max_prob", "entropy"] + ["embedding", "draft_prob"] * (predicts == "next_token")
    )
    batch = head_batch()
    here = head_features(exact_pairs[0], batch, predicts, needs)
    there = head_features(exact_pairs[1], batch.to(device), predicts, needs)
    assert here.keys() == there.keys() == needs
    for name, expected in here.items():
        torch.testing.assert_close(there[name].cpu(), expected, rtol=1e-9, atol=1e-12)


def test_a_training_step_of_heads(exact_pairs, device):
    trained = []
    for pair, place in zip(exact_pairs, (CPU, device), strict=True):
        bank = HeadBank(specs(pair.draft_lm.hidden_size), seed=0).double().to(place)
        batch = head_batch().to(place)
        features = head_features(pair, batch, bank.predicts, bank.needs)
        bank.standardise(features)
        before = copy.deepcopy(bank.state_dict())
        sums, weights = bank.losses(bank(features), batch.label)
        (sums / weights).sum().backward()
        bank.clip_gradients(0.1)
        torch.optim.SGD(
            bank.parameters(), lr=1.0
        ).step()  # a step as long as the gradient, which AdamW would hide
        trained.append({name: value.detach().cpu() for name, value in bank.state_dict().items()})
        assert any(
            not torch.equal(value, before[name]) for name, value in bank.state_dict().items()
        )
    for name, expected in trained[0].items():
        torch.testing.assert_close(trained[1][name], expected, rtol=1e-7, atol=1e-10)


# --- distillation


@pytest.mark.parametrize("reads_target", [False, True])
@pytest.mark.parametrize("divergence", ["total_variation", "forward_kl"])
def test_a_step_of_distillation(pairs, texts, device, divergence, reads_target):
    for library in ("pydantic", "lightning"):  # which a machine for measurements may lack
        pytest.importorskip(library)
    from specheads.training.distill.distill_module import DistillModule
    from specheads.training.distill.samples import Sample
    from specheads.training.distill.settings import Distillation

    settings = Distillation(divergence=divergence, warp=Warp())
    samples = [Sample(*map(np.array, text)) for text in zip(*texts, strict=True)]
    gradients = []
    for both, place in zip(pairs, (CPU, device), strict=True):
        pair = with_angles_of_the_cpu(reading_pair(both) if reads_target else both)
        pair.draft.requires_grad_(True).train()
        module = DistillModule(pair, settings).to(place)
        losses, overlaps, _ = module.losses(samples)
        losses.mean().backward()
        weights = {name: weight.grad.cpu() for name, weight in pair.draft.named_parameters()}
        gradients.append(
            weights | {"losses": losses.detach().cpu(), "overlaps": overlaps.detach().cpu()}
        )
    assert all(value.abs().max() > 0 for value in gradients[0].values())
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-7, atol=1e-10)
