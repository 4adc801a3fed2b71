"""Training in which memory does not suffice for a whole batch: the same weights and curves, and one warning."""

import copy

import numpy as np
import pytest
import torch
from fakes import tiny_llama, tiny_pair
from training.distill.test_distill_module import ANSWERS, PROMPTS, RESPONSES, SETTINGS, VOCAB, fit
from training.heads.test_head_module import data_of, new_module, spec, trainer

from specheads.language_model import LanguageModel
from specheads.training.distill.distill_module import DistillModule
from specheads.training.distill.samples import HeldOutSamples, TrainSamples
from specheads.training.loaders import ResumableData

MOMENTS = ["losses", "gradients"]


class Memory:
    """Memory for `most` texts at a time, from the call `after` on; it runs out in a forward pass, or within a backward pass."""

    def __init__(self, moment, most, after=0):
        self.moment, self.most, self.after = moment, most, after
        self.size, self.calls, self.failures = 0, 0, 0

    def check(self):
        if self.size > self.most and self.calls > self.after:
            self.failures += 1
            raise torch.OutOfMemoryError("out of memory, says a test")

    def limit(self, module, name, size_of, weight):
        """Let the method `name` need memory for `size_of(argument)` texts; `weight` gets its gradient after others have."""
        call = getattr(module, name)

        def limited(argument):
            self.size = size_of(argument)
            self.calls += 1
            if self.moment == "losses":
                self.check()
            return call(argument)

        setattr(module, name, limited)
        if self.moment == "gradients":
            weight.register_hook(lambda gradient: self.check())


def heads(nano, rows, folder, memory=None, accumulate=1):
    """Train two heads; return their weights and curves."""
    module = new_module(nano, spec(nano, name="one", depth=1), spec(nano, name="two", depth=0, reject_weight=4.0))
    first = copy.deepcopy(module.bank.state_dict())
    module.configure_optimizers = lambda: torch.optim.SGD(module.bank.parameters(), lr=0.3)
    if memory:
        memory.limit(module, "_loss_sums", lambda batch: len(batch.tokens), next(module.bank.parameters()))
    training = trainer(folder, max_epochs=3, accumulate_grad_batches=accumulate, log_every_n_steps=1)
    training.fit(module, data_of(rows, "next_token", batch_size=8 // accumulate))
    assert training.global_step == 6
    weights = module.bank.state_dict()
    assert not any(torch.allclose(weights[name], before, atol=1e-3) for name, before in first.items() if "weight" in name)
    return weights, module.history, module.num_parts


def draft(folder, memory=None, accumulate=1, samples="target", token_share=1.0):
    """Distil a draft; return its weights and curves."""
    pair = tiny_pair(VOCAB, scale=2.0)
    pair.draft.requires_grad_(True).train()
    chosen = {"loss": {"token_share": token_share}, "reference": "somewhere"} if token_share < 1 else {}
    settings = SETTINGS.but(samples=samples, **chosen)
    if samples == "mixed":
        settings = settings.but(mixed={"text": 1, "target": 1, "on_policy": 2})
    reference = LanguageModel(tiny_llama(VOCAB, seed=9, scale=2.0), VOCAB) if token_share < 1 else None
    module = DistillModule(pair, settings, max_new_tokens=8, reference=reference)
    module.configure_optimizers = lambda: torch.optim.SGD(module.draft.parameters(), lr=0.05)
    if memory:
        memory.limit(module, "_losses", len, pair.draft.get_input_embeddings().weight)
    held_out = HeldOutSamples(PROMPTS, ANSWERS)
    splits = {"train": TrainSamples(PROMPTS, RESPONSES, settings.shares, 0), "dev": held_out, "test": held_out}
    data = ResumableData(splits, 4 // accumulate, 0, seed=0, collate=list)
    fit(module, data, folder, epochs=2, accumulate_grad_batches=accumulate)
    return module.draft.state_dict(), module.history, module.num_parts


@pytest.fixture(scope="module")
def rows(nano, prompts):
    generator = np.random.default_rng(1)
    made = []
    for number in range(12):
        length = int(generator.integers(8, 17))
        made.append(
            {
                "prompt_ids": prompts[number % len(prompts)][:6],
                "response_ids": generator.integers(2, 12, size=length).tolist(),
                "draft_ids": generator.integers(2, 12, size=length).tolist(),
                "accept_prob": generator.random(length).tolist(),
                "overlap": generator.random(length).tolist(),
                "more_draft_ids": [],
                "more_accept_prob": [],
            }
        )
    return made


def check_same(trained, expected):
    (weights, history, _), (their_weights, their_history, _) = trained, expected
    for name, weight in weights.items():
        torch.testing.assert_close(weight, their_weights[name], rtol=1e-4, atol=1e-5)
    assert [step for step, _ in history] == [step for step, _ in their_history]
    for (_, point), (_, theirs) in zip(history, their_history, strict=True):
        assert point == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("most", "after", "parts"), [(4, 0, 2), (1, 0, 8), (3, 3, 4)])
def test_heads_learn_the_same_in_parts(nano, rows, tmp_path, caplog, moment, most, after, parts):
    memory = Memory(moment, most, after)
    trained = heads(nano, rows, tmp_path / "parts", memory)
    check_same(trained, heads(nano, rows, tmp_path / "whole"))
    assert trained[2] == parts and memory.failures == parts.bit_length() - 1
    assert caplog.text.count("does not fit into memory") == memory.failures


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("after", range(4))
def test_batches_of_an_accumulated_step_are_worked_on_again(nano, rows, tmp_path, moment, after):
    """Wherever in a step memory runs out, its gradients are those of all its batches."""
    memory = Memory(moment, 2, after)
    trained = heads(nano, rows, tmp_path / "parts", memory, accumulate=2)
    check_same(trained, heads(nano, rows, tmp_path / "whole", accumulate=2))
    assert memory.failures == 1


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("samples", ["target", "mixed"])
@pytest.mark.parametrize(("accumulate", "after"), [(1, 0), (2, 1)])
def test_drafts_learn_the_same_in_parts(tmp_path, moment, samples, accumulate, after):
    memory = Memory(moment, 1, after)
    trained = draft(tmp_path / "parts", memory, accumulate, samples)
    check_same(trained, draft(tmp_path / "whole", None, accumulate, samples))
    assert trained[2] == 4 // accumulate and memory.failures


@pytest.mark.parametrize("moment", MOMENTS)
def test_tokens_are_chosen_among_those_of_all_parts(tmp_path, moment):
    """AdaSPEC learns from the tokens with the most to gain in a batch, not in a part."""
    trained = draft(tmp_path / "parts", Memory(moment, 1), token_share=0.4)
    check_same(trained, draft(tmp_path / "whole", token_share=0.4))


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_does_not_fit_alone_is_an_error(nano, rows, tmp_path, moment):
    with pytest.raises(torch.OutOfMemoryError):
        heads(nano, rows, tmp_path, Memory(moment, 0))


def test_other_errors_are_not_tried_again(tmp_path):
    class Broken(Memory):
        def check(self):
            self.failures += 1
            raise RuntimeError("broken")

    broken = Broken("losses", 0)
    with pytest.raises(RuntimeError, match="broken"):
        draft(tmp_path, broken)
    assert broken.failures == 1


def test_several_processes_are_not_split(tmp_path, monkeypatch):
    """The others would wait for gradients of the process that begins a step again."""
    monkeypatch.setattr("lightning.Trainer.world_size", 2)
    module = DistillModule(tiny_pair(VOCAB), SETTINGS, max_new_tokens=8)
    module._batches = [([1, 2, 3], 0)]
    module.trainer = trainer(tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        module._check_splittable(torch.OutOfMemoryError("full"))


@pytest.mark.parametrize(("count", "size"), [(1, 5), (2, 5), (4, 6), (8, 3)])
def test_parts_are_consecutive_and_nearly_equal(count, size):
    module = DistillModule(tiny_pair(VOCAB), SETTINGS, max_new_tokens=8)
    module.num_parts = count
    parts = module.parts(list(range(size)))
    assert [row for part in parts for row in part] == list(range(size))
    assert len(parts) == min(count, size) and max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_of_a_batch_has_its_texts_and_their_tokens(nano, rows):
    batch = next(iter(data_of(rows, "next_token").loader("train")))
    parts = [batch.part(0, 1), batch.part(1, len(batch.tokens))]
    for name in ("index", "drafted", "start", "alive", "label"):
        values = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(values, getattr(batch, name)) or name == "label" and values.isnan().any()
    assert torch.equal(torch.cat([parts[0].row, parts[1].row + 1]), batch.row)
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
