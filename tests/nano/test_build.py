import json
from pathlib import Path

import pytest
import torch

from specheads.nano import build, corpus

FOLDER = Path(build.__file__).parent


def test_the_shipped_pair_is_small_and_in_16_bits(nano):
    assert nano.target.num_parameters() <= 6_000_000
    assert nano.draft.num_parameters() <= 900_000
    files = [FOLDER / role / "model.safetensors" for role in ("target", "draft")]
    assert sum(file.stat().st_size for file in files) <= 14_000_000
    assert 2048 <= nano.vocab_size <= 4096
    assert nano.window >= 2048


def test_the_tokenizer_gives_every_text_back(nano):
    text = "def f(x):\n\tif x > 1_000:\n        return 'naïve 中文 🙂'\n\n\n"
    ids = nano.tokenizer(text)["input_ids"]
    assert ids[0] == nano.tokenizer.bos_token_id and ids.count(ids[0]) == 1
    assert nano.decode(ids) == text


def test_prompt_and_body_are_the_same_tokens_apart_as_together(nano):
    for function in list(corpus.standard_library("dev"))[:50]:
        together = nano.tokenizer(function.prompt + function.body)["input_ids"]
        body = nano.tokenizer(function.body, add_special_tokens=False)["input_ids"]
        assert together == nano.tokenizer(function.prompt)["input_ids"] + body


def test_the_card_is_made_of_the_recorded_training():
    results = json.loads((FOLDER / "training.json").read_text())
    assert (FOLDER / "README.md").read_text() == build.card(results)
    assert all(row["licence"] for row in results["sources"])


def test_the_target_is_better_than_the_draft_on_held_out_functions(nano):
    functions = list(corpus.standard_library("test"))[:40]
    target, draft = (build.response_loss(model, nano.tokenizer, functions) for model in (nano.target, nano.draft))
    assert target < draft - 0.3 and draft < 4.5  # an untrained model has log(2048) = 7.6


def test_training_is_repeatable_and_learns(monkeypatch):
    monkeypatch.setitem(
        build.SHAPES, "draft", {**build.SHAPES["draft"], "hidden_size": 40, "intermediate_size": 32, "head_dim": 8}
    )
    stream = torch.arange(2000, dtype=torch.int16) % 17
    recipe = build.Recipe(steps=40, tokens_per_step=64, length=32, long_length=64, warmup=2)
    losses, weights = [], []
    for _ in range(2):
        model = build.new_model("draft", seed=3)
        build.fit(model, stream, recipe)
        ids = stream[:64].long()[None]
        losses.append(model(ids, labels=ids).loss.item())
        weights.append(model.get_input_embeddings().weight.clone())
    assert torch.equal(*weights) and losses[0] < 6


def test_training_that_is_killed_goes_on_to_the_same_weights(monkeypatch, tmp_path):
    monkeypatch.setitem(
        build.SHAPES, "draft", {**build.SHAPES["draft"], "hidden_size": 40, "intermediate_size": 32, "head_dim": 8}
    )
    monkeypatch.setattr(build, "CHECKPOINT_STEPS", 4)
    stream = torch.arange(500, dtype=torch.int16) % 17
    recipe = build.Recipe(steps=11, tokens_per_step=64, length=32, long_length=64, warmup=2)
    whole = build.new_model("draft", seed=3)
    build.fit(whole, stream, recipe)
    batch = build.Recipe.batch

    def killed(recipe, stream, step):
        if step == 9:
            raise KeyboardInterrupt
        return batch(recipe, stream, step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build.Recipe, "batch", killed)
        build.fit(build.new_model("draft", seed=3), stream, recipe, tmp_path / "draft.ckpt")
    assert torch.load(tmp_path / "draft.ckpt", weights_only=True)["step"] == 8
    resumed = build.new_model("draft", seed=4)  # its own weights do not matter
    build.fit(resumed, stream, recipe, tmp_path / "draft.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    other = build.new_model("draft", seed=3)
    build.fit(other, stream % 5, recipe, tmp_path / "draft.ckpt")  # another text: starts anew
    assert not torch.equal(next(whole.parameters()), next(other.parameters()))


@pytest.mark.parametrize("step, expected", [(0, 0.1), (9, 1.0), (49, 1.0), (75, 0.5), (99, 0.02)])
def test_the_rate_rises_stays_and_falls(step, expected):
    assert build.Recipe(steps=100, warmup=10, cooldown=0.5).rate(step) == pytest.approx(expected)
