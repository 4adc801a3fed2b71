import json
from pathlib import Path

from specheads.embedded import corpus
from specheads.embedded.card import card
from specheads.embedded.training import response_loss
from specheads.nano import build

FOLDER = Path(build.__file__).parent


def test_the_shipped_pair_is_small_and_in_16_bits(nano):
    assert nano.target.num_parameters() <= 6_000_000
    assert nano.draft.num_parameters() <= 900_000
    files = [FOLDER / role / "model.safetensors" for role in ("target", "draft")]
    assert sum(file.stat().st_size for file in files) <= 14_000_000
    assert 2048 <= nano.vocab_size <= 4096
    assert nano.window >= 2048


def test_the_tokenizer_restores_every_text(nano):
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
    assert (FOLDER / "README.md").read_text() == card(build.NANO, results)
    assert all(row["licence"] for row in results["sources"])


def test_the_recipe_is_that_of_the_shipped_weights(nano):
    results = json.loads((FOLDER / "training.json").read_text())
    for role, model in (("target", nano.target), ("draft", nano.draft)):
        assert results[role]["recipe"]["steps"] == build.NANO.recipes[role].steps
        expected = {name: value.shape for name, value in build.NANO.new_model(role, 0).state_dict().items()}
        assert {name: value.shape for name, value in model.state_dict().items()} == expected


def test_the_target_is_better_than_the_draft_on_held_out_functions(nano):
    functions = list(corpus.standard_library("test"))[:40]
    target, draft = (response_loss(model, nano.tokenizer, functions) for model in (nano.target, nano.draft))
    assert target < draft - 0.3 and draft < 4.5  # an untrained model has log(2048) = 7.6
