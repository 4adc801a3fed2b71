"""Training steps, the draft's quality, and runs that are resumed after a kill, on tiny models."""

import copy
from itertools import chain

import numpy as np
import pytest
import torch
from fakes import tiny_pair
from feature_drafts import by_loop, features_of, reading_pair
from safetensors.torch import load_file
from training_runs import KillAt, Killed, curves_of, quiet_trainer, with_curves
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specheads import Warp
from specheads.interrupts import Request
from specheads.training.distill.distill_loss import DIVERGENCES
from specheads.training.distill.distill_module import DistillModule
from specheads.training.distill.distillation import prepare
from specheads.training.distill.draft_quality import block_efficiency, draft_quality
from specheads.training.distill.samples import Samples, TargetStore, held_out
from specheads.training.distill.settings import Distillation
from specheads.training.loaders import ResumableData
from specheads.training.trainer import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")

VOCAB = 10
EPOCHS = 3
BATCHES = 4
EVERY = 2
WARP = Warp(1.0, top_k=6)
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, VOCAB, size) for size in RANDOM.integers(2, 6, 8)]
ANSWERS = [RANDOM.integers(0, VOCAB, size) for size in RANDOM.integers(1, 9, 8)]
RESPONSES = [[answer] for answer in ANSWERS]
SETTINGS = Distillation(optimizer={"lr": 1e-2}, warp=WARP)


def pair_of(kind):
    """Return a pair whose draft reads tokens alone, or its target too."""
    pair = tiny_pair(VOCAB, scale=2.0)
    return pair if kind == "alone" else reading_pair(pair, borrows=True, norm_output=True)


@pytest.fixture
def pair():
    return pair_of("alone")


both_kinds = pytest.mark.parametrize("kind", ["alone", "reads its target"])


def new_module(pair, settings=SETTINGS):
    prepare(pair.draft)
    return DistillModule(pair, settings)


def splits(stored=None):
    return {
        "train": Samples(PROMPTS, RESPONSES, stored),
        "dev": held_out(PROMPTS, ANSWERS),
        "test": held_out(PROMPTS, ANSWERS),
    }


def fit(module, data, folder, epochs=EPOCHS, callbacks=(), earlier=None, **changes):
    trainer = quiet_trainer(
        folder, epochs, callbacks=list(callbacks), **with_curves(folder), **changes
    )
    module.before = draft_quality(module.pair, data.splits["dev"], WARP, 3)
    trainer.fit(module, data, ckpt_path=earlier)
    return trainer


def test_block_efficiency_is_the_expected_number_of_tokens():
    """By enumeration of how many tokens are accepted before the first rejection."""
    for chance in (0.0, 0.3, 0.9, 1.0):
        lengths = [chance**n * (1 - chance) for n in range(4)] + [chance**4]
        assert block_efficiency([chance] * 4) == pytest.approx(
            sum(p * (n + 1) for n, p in enumerate(lengths))
        )
    # Two tokens, none accepted by 0.4, both by 0.6 * 0.5
    assert block_efficiency([0.6, 0.5]) == pytest.approx(1 * 0.4 + 2 * 0.3 + 3 * 0.3)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_quality_is_that_of_the_distributions(pair, batch_size):
    overlaps = []
    divergences = []
    same = []
    for row in range(8):
        whole = torch.tensor([[*PROMPTS[row], *ANSWERS[row]]])
        with torch.no_grad():
            both = [
                model(whole).logits[0, len(PROMPTS[row]) - 1 : -1]
                for model in (pair.target, pair.draft)
            ]
        t, d = (WARP(logits) for logits in both)
        overlaps += torch.minimum(t, d).sum(-1).tolist()
        t, d = (logits.softmax(-1) for logits in both)
        divergences += (t * (t / d).log()).sum(-1).tolist()
        same += (t.argmax(-1) == d.argmax(-1)).tolist()
    pair.draft.train()
    quality = draft_quality(pair, held_out(PROMPTS, ANSWERS), WARP, batch_size)
    assert pair.draft.training
    assert quality["overlap"] == pytest.approx(np.mean(overlaps)) and quality[
        "kl"
    ] == pytest.approx(np.mean(divergences))
    assert quality["agreement"] == pytest.approx(np.mean(same))
    assert quality["block_efficiency_4"] == pytest.approx(block_efficiency([np.mean(overlaps)] * 4))


@both_kinds
@pytest.mark.parametrize("divergence", ["total_variation", "forward_kl"])
def test_training_brings_the_draft_closer(kind, tmp_path, divergence):
    pair = pair_of(kind)
    settings = SETTINGS.but(divergence=divergence, optimizer={"lr": 3e-2})
    data = ResumableData(splits(), 4, seed=0, collate=list)
    module = new_module(pair, settings)
    before = copy.deepcopy(pair.target.state_dict())
    fit(module, data, tmp_path, epochs=12)
    first = module.before
    last = draft_quality(pair, data.splits["dev"], WARP, 4)
    assert last["overlap"] > first["overlap"] + 0.1 and last["kl"] < first["kl"]
    assert all(
        torch.equal(weight, before[name]) for name, weight in pair.target.state_dict().items()
    )
    curve = [point["dev/overlap"] for _, point in module.history if "dev/overlap" in point]
    assert (
        len(curve) == 13
        and curve[0] == pytest.approx(first["overlap"])
        and curve[-1] == pytest.approx(last["overlap"])
    )


def test_stored_and_recomputed_distributions_train_alike(pair, tmp_path):
    """All tokens of each distribution are kept, so that only half precision makes a difference."""
    store = TargetStore(tmp_path, pair, Samples(PROMPTS, RESPONSES), num_kept=VOCAB)
    store.make()
    results = []
    for same_pair, stored in ((pair, None), (tiny_pair(VOCAB, scale=2.0), store)):
        module = new_module(same_pair)
        results.append(module.losses([splits(stored=stored)["train"][0, row] for row in range(4)]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


def norm_in_float64(norm, hidden):
    """What transformers computes in float32, where the rounding depends on the scale of the
    loss.
    """
    return (
        norm.weight
        * hidden
        * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    )


@both_kinds
def test_a_step_is_that_of_all_its_tokens_in_one_batch(kind, tmp_path, monkeypatch):
    """Two steps of plain gradient descent, the second with fewer batches, against the mean over the
    tokens of each step.
    """
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_float64)
    pair = pair_of(kind)
    same_pair = pair_of(kind)
    data = ResumableData(splits(), 2, seed=0, collate=list)
    module = new_module(pair)
    trained = [weight for weight in pair.draft.parameters() if weight.requires_grad]
    module.configure_optimizers = lambda: torch.optim.SGD(trained, lr=0.1)
    fit(module, data, tmp_path, epochs=1, accumulate_grad_batches=3, gradient_clip_val=None)
    other = new_module(same_pair)
    keys = data.batches("train", shuffle=True).keys(0)
    logged = []
    sizes = [len(ANSWERS[row]) for _, row in keys]
    # Or the mean of the batches would be the same
    assert len({sizes[i] + sizes[i + 1] for i in (0, 2, 4)}) == 3
    for step in (keys[:6], keys[6:]):
        losses, overlaps, weights = other.losses([data.splits["train"][key] for key in step])
        same_pair.draft.zero_grad()
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        logged.append((loss.item(), overlaps[weights > 0].mean().item()))
        for weight in same_pair.draft.parameters():
            if weight.requires_grad:
                weight.data -= 0.1 * weight.grad
    for name, weight in same_pair.draft.named_parameters():
        torch.testing.assert_close(pair.draft.get_parameter(name), weight, atol=1e-10, rtol=0)
    points = [
        (point["train/loss"], point["train/overlap"])
        for _, point in module.history
        if "train/loss" in point
    ]
    assert points == [pytest.approx(values, abs=1e-10) for values in logged]


@pytest.mark.parametrize("divergence", ["total_variation", "forward_kl"])
@pytest.mark.parametrize("kept", [None, torch.tensor([0, 2, 3, 7])])
def test_steps_along_responses_have_the_loss_of_a_plain_loop(kept, divergence, monkeypatch):
    """Values and gradients of all weights, of a draft with all tokens and with some."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_float64)
    pair = reading_pair(tiny_pair(VOCAB, scale=2.0), kept=kept, fc_norm=True)
    settings = SETTINGS.but(divergence=divergence, num_steps=3, step_decay=0.8)
    module = new_module(pair, settings)
    samples = [splits()["train"][0, row] for row in range(5)]
    losses, overlaps, weights = module.losses(samples)
    (losses * weights).sum().backward()
    found = {name: weight.grad.clone() for name, weight in pair.draft.named_parameters()}
    pair.draft.zero_grad()
    total = 0.0
    row = 0
    for sample in samples:
        tokens = torch.from_numpy(np.concatenate([sample.prompt, sample.response])).long()
        with torch.no_grad():
            logits = pair.target(tokens[None]).logits[0].log_softmax(-1)
            features = features_of(pair.target, tokens, pair.draft_lm.reads_layers)
        hidden = by_loop(pair.draft, tokens, features, 3)
        for place in range(len(sample.response)):
            before = len(sample.prompt) - 1 + place  # the position that predicts the token
            for depth in range(3):
                if depth > place:  # no round begins in the prompt
                    assert weights[row, depth] == 0
                    continue
                ours = pair.draft_lm.logits(hidden[depth, before]).log_softmax(-1)
                loss = DIVERGENCES[divergence](logits[before], ours)
                shared = torch.minimum(logits[before].exp(), ours.exp()).sum()
                assert weights[row, depth].item() == pytest.approx(0.8**depth)
                assert losses[row, depth].item() == pytest.approx(loss.item(), abs=1e-9)
                assert overlaps[row, depth].item() == pytest.approx(shared.item(), abs=1e-9)
                total = total + 0.8**depth * loss
            row += 1
    total.backward()
    for name, weight in pair.draft.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, atol=1e-8, rtol=1e-8)


def test_the_quality_of_a_draft_that_reads_its_target_has_each_depth(tmp_path):
    pair = pair_of("reads its target")
    quality = draft_quality(pair, held_out(PROMPTS, ANSWERS), WARP, 3)
    by_depth = [[] for _ in range(4)]
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, answer])).long()
        with torch.no_grad():
            expected = WARP(pair.target(tokens[None]).logits[0])
            features = features_of(pair.target, tokens, pair.draft_lm.reads_layers)
            hidden = by_loop(pair.draft, tokens, features, 4)
            shared = torch.minimum(expected, WARP(pair.draft_lm.logits(hidden))).sum(-1)
        for depth, of_depth in enumerate(by_depth):
            of_depth += shared[depth, len(prompt) - 1 + depth : -1].tolist()
    pooled = [*chain.from_iterable(by_depth)]
    means = [np.mean(of_depth) for of_depth in by_depth]
    assert [quality[f"overlap_{depth}"] for depth in range(4)] == pytest.approx(means)
    assert quality["overlap"] == pytest.approx(np.mean(pooled))
    assert quality["block_efficiency_4"] == pytest.approx(block_efficiency(means))


# --- killed and started again


def attempt(folder, moment=None, kind="alone", **changes):
    """One start of the same command.

    Returns curves, weights and log file, or None if it was killed.
    """
    pair = pair_of(kind)
    module = new_module(pair)
    data = ResumableData(splits(), 2, seed=0, collate=list)
    checkpoints = Checkpoints(folder / "last.ckpt", EVERY, {})
    checkpoints.request = Request()
    earlier = folder / "last.ckpt"
    try:
        fit(
            module,
            data,
            folder,
            EPOCHS,
            [checkpoints, KillAt(moment)],
            earlier if earlier.exists() else None,
            **changes,
        )
    except Killed:
        return None
    weights = {name: weight.detach().clone() for name, weight in pair.draft.named_parameters()}
    return module.history, weights, curves_of(folder)


MOMENTS = EPOCHS * (4 * BATCHES + 2)  # and of validation


@both_kinds
def test_a_run_that_is_killed_at_any_moment_is_resumed_to_the_same_numbers(kind, tmp_path):
    whole = attempt(tmp_path / "whole", kind=kind)
    assert len(whole[0]) == 1 + EPOCHS * (BATCHES + 1) and "dev/overlap" in whole[0][0][1]
    for moment in range(2, MOMENTS + 1, 5):
        folder = tmp_path / str(moment)
        assert attempt(folder, moment, kind) is None
        history, weights, csv = attempt(folder, kind=kind)
        assert (history, csv) == (whole[0], whole[2]), moment
        assert all(torch.equal(weight, whole[1][name]) for name, weight in weights.items())


@both_kinds
def test_a_checkpoint_has_all_weights_but_borrowed_ones(kind, tmp_path):
    attempt(tmp_path, kind=kind)
    pair = pair_of(kind)
    expected = {f"draft.{name}" for name, _ in pair.draft.named_parameters()}
    if kind != "alone":
        expected.remove("draft.embed_tokens.weight")
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert set(stored) == expected
    best = load_file(tmp_path / "last.best.safetensors")
    assert {name.replace("/", ".") for name in best} == expected


def test_the_same_with_accumulated_batches(tmp_path):
    whole = attempt(tmp_path / "whole", accumulate_grad_batches=2)
    assert attempt(tmp_path / "killed", 20, accumulate_grad_batches=2) is None
    again = attempt(tmp_path / "killed", accumulate_grad_batches=2)
    assert again[0] == whole[0] and all(
        torch.equal(weight, whole[1][name]) for name, weight in again[1].items()
    )


def test_curves_of_a_finished_training_are_written_again(pair, tmp_path):
    """A run that was killed after its last step takes none when it is resumed, and its curves are
    in its checkpoint.
    """
    data = ResumableData(splits(), 4, seed=0, collate=list)
    fit(new_module(pair), data, tmp_path / "whole", epochs=2).save_checkpoint(
        tmp_path / "last.ckpt"
    )
    whole = (tmp_path / "whole" / "csv" / "metrics.csv").read_bytes()
    assert (
        fit(
            new_module(pair), data, tmp_path / "resumed", epochs=2, earlier=tmp_path / "last.ckpt"
        ).global_step
        == 4
    )
    assert (tmp_path / "resumed" / "csv" / "metrics.csv").read_bytes() == whole
