import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specheads import nano
from specheads.embedded import build, corpus
from specheads.embedded.recipe import PairRecipe, Recipe
from specheads.embedded.sources import Source, differences
from specheads.language_model import set_draft_temperature
from specheads.revisions import folder_revision

SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FUNCTIONS = [corpus.Function(f"def f{i}(x):\n", f"    return x + {i}\n" * 40, "x.py") for i in range(400)]


@pytest.fixture
def sources():
    """The sources on this machine; a test may change them."""
    return [Source("one", "1.0", "MIT", FUNCTIONS[4:200]), Source("two", "2.0", "BSD", FUNCTIONS[200:])]


@pytest.fixture
def pair(monkeypatch, tmp_path, sources):
    """A tiny pair with nano's tokenizer, pinned to a text of two sources."""
    held_out = {"dev": FUNCTIONS[:2], "test": FUNCTIONS[2:4]}
    monkeypatch.setattr(build, "held_out_functions", lambda: held_out)
    monkeypatch.setattr(build, "training_sources", lambda held_out: sources)
    pinned = PairRecipe(
        "tiny",
        {"target": SHAPE, "draft": SHAPE},
        {role: Recipe(steps, tokens_per_step=128, length=64, long_length=64) for role, steps in (("target", 2), ("draft", 1))},
        torch.bfloat16,
        tokenizer=Path(nano.__file__).parent,
        manifest=tmp_path / "corpus.json",
    )
    assert build.main(pinned, ["--pin", "--out", str(tmp_path / "pin")]) == 0
    return pinned


def weights(out):
    return {role: load_file(out / role / "model.safetensors") for role in ("target", "draft")}


def test_a_build_leaves_weights_in_the_pairs_type_and_a_card(pair, tmp_path):
    out = tmp_path / "out"
    assert build.main(pair, ["--out", str(out)]) == 0
    assert {tensor.dtype for part in weights(out).values() for tensor in part.values()} == {torch.bfloat16}
    results = json.loads((out / "training.json").read_text())
    assert results["target"]["recipe"]["steps"] == 2 and results["draft"]["dev_losses"].keys() == {"1"}
    assert results["sources"] == json.loads(pair.manifest.read_text())
    card = (out / "README.md").read_text()
    assert "# tiny, an embedded pair" in card and "the tokenizer of nano by `python -m specheads.tiny.build`" in card
    assert "| two | 2.0 | BSD | 200 |" in card
    assert "benchmarks/" not in card  # no script computes figures for this pair


def test_a_build_continues_with_the_text_it_kept(pair, sources, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    assert build.main(pair, ["--out", str(first)]) == 0
    again.mkdir()
    for name in (build.STREAM, build.STREAM_CARD):
        (again / name).write_bytes((first / name).read_bytes())
    sources.clear()  # everything is uninstalled
    assert build.main(pair, ["--out", str(again)]) == 0
    for role, part in weights(first).items():
        assert all(torch.equal(tensor, weights(again)[role][name]) for name, tensor in part.items())
    (again / build.STREAM).write_bytes((first / build.STREAM).read_bytes()[:-2] + b"\0\0")  # damaged
    assert build.main(pair, ["--out", str(again)]) == 2


def test_stages_follow_each_other(pair, tmp_path, monkeypatch):
    stages = [
        Recipe(2, tokens_per_step=128, length=64, long_length=64),
        Recipe(1, tokens_per_step=128, length=32, long_length=32),
    ]
    two = replace(pair, recipes={"target": replace(stages[0], then=stages[1])})
    seen, fit = [], build.fit

    def kept(model, stream, recipe, *others):
        seen.append((recipe.length, recipe.seed))
        return fit(model, stream, recipe, *others)

    monkeypatch.setattr(build, "fit", kept)
    for out in ("once", "again"):
        assert build.main(two, ["--out", str(tmp_path / out), "--seed", "3"]) == 0
    assert seen == 2 * [(64, 3), (32, 3)]
    results = json.loads((tmp_path / "once" / "training.json").read_text())["target"]
    assert results["tokens"] == 3 * 128 and list(results["dev_losses"]) == ["2", "3"]
    assert results["recipe"]["then"]["length"] == 32
    model = two.new_model("target", 3)
    for stage in stages:
        fit(model, torch.from_numpy(np.load(tmp_path / "once" / build.STREAM)), replace(stage, seed=3))
    for out in ("once", "again"):
        made = load_file(tmp_path / out / "target" / "model.safetensors")
        assert all(torch.equal(weight, model.state_dict()[name].bfloat16()) for name, weight in made.items())


def test_another_text_is_an_error_that_names_the_differences(pair, sources, tmp_path, capsys):
    sources[1:] = [replace(sources[1], version="3.0", functions=FUNCTIONS[201:]), Source("three", "1", "MIT", FUNCTIONS[200:201])]
    assert build.main(pair, ["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "2 sources are not what tiny is pinned to" in error and "--any-corpus" in error
    assert "three 1 is not pinned (1 functions found)" in error
    assert "two: 3.0 (BSD) with 199 functions, pinned is 2.0 (BSD) with 200 functions" in error
    assert build.main(pair, ["--out", str(tmp_path / "out"), "--any-corpus"]) == 0


def test_order_and_version_make_no_difference_but_text_and_licence_do():
    original = Source("one", "1.0", "MIT", FUNCTIONS[:3])
    changed = replace(FUNCTIONS[0], prompt="def g(x):\n")
    assert not differences([original.row], [replace(original, version="2.0", functions=FUNCTIONS[:3][::-1]).row])
    assert "of other text" in differences([original.row], [replace(original, functions=[changed, *FUNCTIONS[1:3]]).row])[0]
    assert "(GPL)" in differences([original.row], [replace(original, licence="GPL").row])[0]
    assert "not installed" in differences([original.row], [])[0]


def test_a_pair_without_a_manifest_or_tokenizer_makes_its_own(pair, tmp_path):
    alone = replace(pair, tokenizer=None, manifest=None)
    assert build.main(alone, ["--out", str(tmp_path)]) == 0
    assert (tmp_path / "tokenizer.json").exists() and not (tmp_path / build.STREAM).exists()
    with pytest.raises(SystemExit):
        build.main(alone, ["--any-corpus"])


def test_training_functions_are_written_as_prompts_of_a_distillation(pair, sources, tmp_path):
    file = tmp_path / "texts" / "functions.jsonl"
    assert build.main(pair, ["--functions", str(file), "--out", str(tmp_path / "out")]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((row["prompt"], row["body"]) for row in rows) == sorted((f.prompt, f.body) for f in FUNCTIONS[4:])
    assert not (tmp_path / "out" / "target").exists()


@pytest.fixture
def distilled(tmp_path, pair):
    """A folder as task=distill writes it."""
    draft = pair.new_model("draft", 7)
    set_draft_temperature(draft, 0.9)
    draft.save_pretrained(tmp_path / "distilled")
    return tmp_path / "distilled"


def describe(distilled, target):
    """Write what task=distill says of a draft for a target."""
    content = {"steps": 1200, "num_prompts": 3000, "seconds": 61.4}
    content["target"] = {"id": str(target), "revision": folder_revision(target)}
    (distilled / "distill.json").write_text(json.dumps(content))


def test_a_distilled_draft_joins_its_target(pair, distilled, tmp_path):
    out = tmp_path / "out"
    alone = replace(pair, recipes={"target": pair.recipes["target"]})
    assert build.main(alone, ["--out", str(out)]) == 0
    describe(distilled, out / "target")
    results = json.loads((out / "training.json").read_text())
    (out / "training.json").write_text(json.dumps(results | {"figures": {"overlap": "of another draft"}}))
    assert build.main(alone, ["--out", str(out), "--draft", str(distilled)]) == 0
    assert "figures" not in json.loads((out / "training.json").read_text())
    expected = load_file(distilled / "model.safetensors")
    for name, weight in weights(out)["draft"].items():
        assert torch.equal(weight, expected[name].bfloat16())
    assert json.loads((out / "draft" / "config.json").read_text())["draft_temperature"] == 0.9
    assert json.loads((out / "training.json").read_text())["draft"]["distilled"]["steps"] == 1200
    text = (out / "README.md").read_text()
    assert "| 1,200 steps of distillation on 3,000 prompts |" in text and "| seconds of training | 0 | 61 |" in text


def test_a_draft_that_does_not_belong_to_the_pair_is_refused(pair, distilled, tmp_path, capsys):
    out = tmp_path / "out"
    assert build.main(pair, ["--out", str(out), "--draft", str(distilled)]) == 2
    assert "training.json is missing; train the target first" in capsys.readouterr().err
    assert build.main(pair, ["--out", str(out)]) == 0
    assert build.main(pair, ["--out", str(out), "--draft", str(out / "draft")]) == 2
    assert "distill.json is missing; give the folder of a draft" in capsys.readouterr().err
    describe(distilled, out / "draft")
    assert build.main(pair, ["--out", str(out), "--draft", str(distilled)]) == 2
    assert f"was distilled for another target than {out / 'target'}, {out / 'draft'}" in capsys.readouterr().err
    describe(distilled, out / "target")
    other = replace(pair, shapes=pair.shapes | {"draft": SHAPE | {"num_hidden_layers": 2}})
    assert build.main(other, ["--out", str(out), "--draft", str(distilled)]) == 2
    assert "is not of the shape of tiny's draft, {'num_hidden_layers': 2" in capsys.readouterr().err


def test_the_licences_of_the_text_are_written(pair, monkeypatch, tmp_path):
    monkeypatch.setattr("specheads.embedded.notice.licence_texts", lambda name: [f"Copyright of {name}\n", "  Do what\nyou like"])
    assert build.main(pair, ["--notice", str(tmp_path / "of" / "NOTICE"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "of" / "NOTICE").read_text()
    line = "=" * 100
    assert f"{line}\none 1.0, two 2.0\n{line}\n\n  Do what\nyou like\n" in text
    assert text.count("Copyright of ") == 2 and not (tmp_path / "out" / "target").exists()


def test_functions_of_another_text_are_not_written(pair, sources, tmp_path, capsys):
    sources[1] = replace(sources[1], functions=sources[1].functions[1:])
    assert build.main(pair, ["--functions", str(tmp_path / "functions.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "1 sources are not what tiny is pinned to" in capsys.readouterr().err and not (tmp_path / "functions.jsonl").exists()
