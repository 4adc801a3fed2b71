import pytest
import torch

from specheads.embedded import training
from specheads.embedded.recipe import PairRecipe, Recipe

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 40,
    "intermediate_size": 32,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
PAIR = PairRecipe("tiny", {"draft": SHAPE}, {"draft": Recipe(1)}, torch.float16)
STREAM = torch.arange(2000, dtype=torch.int16) % 17


def recipe(steps):
    return Recipe(steps=steps, tokens_per_step=64, length=32, long_length=64, warmup=2)


def equal_weights(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.fixture
def often(monkeypatch):
    """Checkpoints every 4 steps, dev losses every 3."""
    monkeypatch.setattr(training, "CHECKPOINT_STEPS", 4)
    monkeypatch.setattr(training, "DEV_STEPS", 3)


def killed_at(monkeypatch, step):
    """Let batches end the process at `step`."""
    batch = Recipe.batch

    def killed(recipe, stream, number):
        if number == step:
            raise KeyboardInterrupt
        return batch(recipe, stream, number)

    monkeypatch.setattr(Recipe, "batch", killed)


def test_training_is_repeatable_and_learns():
    models = [PAIR.new_model("draft", seed=3) for _ in range(2)]
    for model in models:
        training.fit(model, STREAM, recipe(40))
    ids = STREAM[:64].long()[None]
    assert equal_weights(*models) and models[0](ids, labels=ids).loss.item() < 6


def test_training_that_is_killed_continues_to_the_same_weights(monkeypatch, tmp_path, often):
    def position_loss(model):
        return round(model.get_input_embeddings().weight.norm().item(), 4)

    whole = PAIR.new_model("draft", seed=3)
    expected = training.fit(whole, STREAM, recipe(11), dev_loss=position_loss)
    with monkeypatch.context() as patch:
        killed_at(patch, 9)
        with pytest.raises(KeyboardInterrupt):
            training.fit(PAIR.new_model("draft", seed=3), STREAM, recipe(11), tmp_path / "draft.ckpt", position_loss)
    assert torch.load(tmp_path / "draft.ckpt", weights_only=True)["progress"]["step"] == 8
    resumed = PAIR.new_model("draft", seed=4)  # its weights do not matter
    actual = training.fit(resumed, STREAM, recipe(11), tmp_path / "draft.ckpt", position_loss)
    assert equal_weights(whole, resumed)
    assert actual.dev_losses == expected.dev_losses and list(actual.dev_losses) == [3, 6, 9, 11]


def test_slow_steps_are_saved_sooner(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0)
    killed_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        training.fit(PAIR.new_model("draft", seed=3), STREAM, recipe(11), tmp_path / "draft.ckpt")
    assert torch.load(tmp_path / "draft.ckpt", weights_only=True)["progress"]["step"] == 3


def test_a_finished_training_is_read_from_its_checkpoint(monkeypatch, tmp_path):
    first, again = PAIR.new_model("draft", seed=3), PAIR.new_model("draft", seed=4)
    training.fit(first, STREAM, recipe(5), tmp_path / "draft.ckpt")
    killed_at(monkeypatch, 0)
    assert training.fit(again, STREAM, recipe(5), tmp_path / "draft.ckpt").step == 5
    assert equal_weights(first, again)


@pytest.mark.parametrize("changed", ["text", "recipe"])
def test_a_checkpoint_of_another_training_is_not_continued(tmp_path, changed):
    training.fit(PAIR.new_model("draft", seed=3), STREAM, recipe(5), tmp_path / "draft.ckpt")
    stream, steps = (STREAM % 5, 5) if changed == "text" else (STREAM, 6)
    expected, actual = PAIR.new_model("draft", seed=3), PAIR.new_model("draft", seed=3)
    training.fit(expected, stream, recipe(steps))
    training.fit(actual, stream, recipe(steps), tmp_path / "draft.ckpt")
    assert equal_weights(expected, actual)


def test_weights_do_not_depend_on_dev_losses(often):
    without, with_ = PAIR.new_model("draft", seed=3), PAIR.new_model("draft", seed=3)
    training.fit(without, STREAM, recipe(7))
    training.fit(with_, STREAM, recipe(7), dev_loss=lambda model: model(STREAM[:40].long()[None]).logits.sum().item())
    assert equal_weights(without, with_)


def test_dev_functions_are_spread_over_all():
    assert training.dev_subset(list(range(640))) == list(range(0, 640, 10))
    assert training.dev_subset([1, 2]) == [1, 2]


@pytest.mark.parametrize(("step", "expected"), [(0, 0.1), (9, 1.0), (49, 1.0), (75, 0.5), (99, 0.02)])
def test_the_rate_rises_stays_and_falls(step, expected):
    assert Recipe(steps=100, warmup=10, cooldown=0.5).rate(step) == pytest.approx(expected)
