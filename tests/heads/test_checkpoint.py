import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import jsonschema
import pytest
import torch
from fakes import tiny_pair
from safetensors.torch import load_file, save_file

from specheads.errors import UserError
from specheads.heads import head as head_module
from specheads.heads.card import card
from specheads.heads.config import KNOWN_INPUTS, HeadConfig
from specheads.heads.head import NUM_GOLDEN, AcceptanceHead, latest_head, load_head, save_head

SCHEMA = json.loads(Path(head_module.__file__).with_name("head.schema.json").read_text())

CONFIG = HeadConfig(
    hidden_size=8,
    depth=2,
    warp={"temperature": 1.0, "top_k": 50, "top_p": 1.0},
    draft={"id": "tiny-draft", "revision": "r2"},
    target={"id": "tiny-target", "revision": "r1"},
    train={"num_prompts": 7, "test": {"auroc": 0.75}},
)


def new_head(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    head = AcceptanceHead(config)
    for tensor in head.state_dict().values():
        tensor.normal_(std=0.5)
    return head


def inputs(config=CONFIG, count=40):
    return torch.randn(count, config.input_size, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path):
    return save_head(new_head(), tmp_path / "heads" / "mine", inputs())


def edit_config(folder, **changes):
    """Write `changes` into config.json; "gone" takes a key out."""
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value != "gone"})
    )


def edit_tensors(folder, name, change):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


# --- a round trip


CONFIGS = [
    CONFIG,
    HeadConfig(hidden_size=8, predicts="input_token", depth=3),
    HeadConfig(hidden_size=8, predicts="input_token", depth=0, width=3),
    HeadConfig(
        hidden_size=8, embedding_size=4, inputs=("max_prob", "embedding"), depth=1, label="overlap"
    ),
    HeadConfig(hidden_size=8, label="block"),  # which no head is trained on any more
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_head_comes_back_as_it_was_saved(tmp_path, config):
    head = new_head(config)
    loaded = load_head(save_head(head, tmp_path / "head", inputs(config)))
    assert loaded.config == config
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(
        torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in head.state_dict().items()
    )
    assert torch.equal(loaded.score(inputs(config)), head.score(inputs(config)))


def test_a_loaded_head_is_ready_to_use_and_not_to_train(folder):
    loaded = load_head(str(folder))
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}


def test_a_head_folder_holds_config_weights_golden_vectors_a_card_and_a_loader(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "custom_generate",
        "golden.safetensors",
        "model.safetensors",
    ]
    golden = load_file(folder / "golden.safetensors")
    assert torch.equal(golden["inputs"], inputs()[:NUM_GOLDEN])
    torch.testing.assert_close(golden["logits"], new_head().score(inputs()[:NUM_GOLDEN]))
    text = (folder / "README.md").read_text()
    for fact in (
        "tiny-draft (revision r2)",
        "tiny-target (revision r1)",
        "next_token",
        "2 residual blocks",
        "top_k=50",
        "trained on | 7 prompts",
        "| AUROC of accepted against rejected tokens | 0.7500 |",
    ):
        assert fact in text


@pytest.mark.parametrize(
    "name",
    [
        "a\n---\nlicense: mit\n---\n# b",
        "[c](d)",
        "<img src=x>",
        "![e](f)",
        "g | h |",
        "https://i.j",
        "www.k.l",
        "`m` [n](o)",
    ],
)
def test_a_name_puts_nothing_into_the_card(name):
    def of(name):
        found = {"recommended": {name: name, "threshold": 0.5}, "train": {"test": {name: 0.5}}}
        return card(
            HeadConfig(
                8, label=name, warp={name: 1.0}, draft={"id": name, "revision": name}, **found
            )
        )

    text = of(name)
    plain = of("x")
    assert (
        len(text.splitlines()) == len(plain.splitlines())
        and text.count("\n---\n") == plain.count("\n---\n") == 1
    )
    shown = re.sub(r"`[^`\n]*`", "", text.partition("## Use")[0])
    assert not re.search(
        r"[\[<]|://|www|(?<!\\)\|.*(?<!\\)\|.*(?<!\\)\|.*(?<!\\)\|",
        shown.partition("# Acceptance")[2],
    )


def test_the_schema_names_what_a_config_holds(tmp_path):
    assert SCHEMA["properties"].keys() == {field.name for field in fields(HeadConfig)}
    assert set(SCHEMA["properties"]["inputs"]["items"]["enum"]) == {
        name for known in KNOWN_INPUTS.values() for name in known
    }
    assert set(SCHEMA["properties"]["predicts"]["enum"]) == KNOWN_INPUTS.keys()
    for config in CONFIGS:
        jsonschema.validate(
            json.loads(save_head(new_head(config), tmp_path).joinpath("config.json").read_text()),
            SCHEMA,
        )


# --- strict loading


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "model",
            lambda tensors: tensors.pop("blocks.1.linear.bias"),
            r"'blocks\.1\.linear\.bias' is no such tensor, expected \(8,\)",
        ),
        (
            "model",
            lambda tensors: tensors.update({"blocks.2.linear.bias": torch.zeros(8)}),
            r"'blocks\.2\.linear\.bias' is \(8,\), expected no such tensor",
        ),
        (
            "model",
            lambda tensors: tensors.update({"readout.weight": torch.zeros(2, 8)}),
            r"'readout\.weight' is \(2, 8\), expected \(1, 8\)",
        ),
        (
            "model",
            lambda tensors: tensors["readout.bias"].add_(0.1),
            r"differ from the golden vectors by 0\.1\.",
        ),
        (
            "model",
            lambda tensors: tensors["readout.bias"].fill_(torch.nan),
            "differ from the golden vectors by nan",
        ),
        (
            "golden",
            lambda tensors: tensors["inputs"].add_(0.1),
            "differ from the golden vectors",
        ),
        (
            "golden",
            lambda tensors: tensors["logits"][:1].fill_(torch.nan),
            "differ from the golden vectors by nan",
        ),
        (
            "golden",
            lambda tensors: tensors.update({"other": tensors.pop("inputs")}),
            "golden.safetensors must hold inputs and logits",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, file, change, message):
    edit_tensors(folder, f"{file}.safetensors", change)
    with pytest.raises(UserError, match=message):
        load_head(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "golden.safetensors"])
@pytest.mark.parametrize("size", [0, 5, 100, -4])
def test_a_truncated_file_is_named(folder, name, size):
    path = folder / name
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=rf"{name} cannot be read"):
        load_head(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "golden.safetensors", "config.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"has no {name}"):
        load_head(folder)


def test_a_single_bit_that_changes_next_to_nothing_is_noticed(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1  # the last bit of a float32
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors cannot be read .*checksum differs"):
        load_head(folder)


def test_files_of_earlier_versions_have_no_checksum_and_are_read(folder):
    head = load_head(folder)
    for name in ("model.safetensors", "golden.safetensors"):
        edit_tensors(folder, name, lambda tensors: None)
    for name, tensor in load_head(folder).state_dict().items():
        assert torch.equal(tensor, head.state_dict()[name])


def test_a_head_that_predicts_a_constant_is_refused(tmp_path):
    head = new_head()
    with torch.no_grad():
        head.readout.weight.zero_()
    with pytest.raises(UserError, match="predicts a constant.*Export or train it again"):
        load_head(save_head(head, tmp_path, inputs()))


# --- the config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 1}, "has head format 1; this version reads 2"),
        ({"format_version": 3}, "has head format 3; this version reads 2"),
        ({"format_version": "gone"}, "has head format None; this version reads 2"),
        # No key can name a file: a head is read from the files of its own folder alone.
        ({"weights": "../another/model.safetensors"}, "has the unknown key 'weights'"),
        ({"depth": 3}, r"blocks\.2\.linear\.bias"),
        *(
            ({key: "gone"}, f"its config lacks the key '{key}'")
            for key in ("hidden_size", "depth", "predicts", "inputs", "width")
        ),
        *(
            ({key: size}, f"the head's {key}={size} must be a positive integer")
            for key in ("hidden_size", "embedding_size", "vocab_size")
            for size in (0, 2.5, "8", True)
        ),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        load_head(folder)


def test_a_calibration_is_kept_and_a_wrong_one_is_named(folder):
    kept = {"slope": [1.5, 0.75], "intercept": [0.0, -0.25]}
    edit_config(folder, calibration=kept)
    head = load_head(folder)
    assert head.config.calibration == kept
    # The head itself is as it was.
    assert torch.equal(head.score(inputs()), new_head().score(inputs()))
    assert load_head(save_head(head, folder, inputs())).config.calibration == kept
    edit_config(folder, calibration={"slope": [1.5]})
    with pytest.raises(UserError, match="the calibration .* must be slope and intercept"):
        load_head(folder)


@pytest.mark.parametrize("text", ["", "{"])
def test_a_config_that_is_not_json_is_a_user_error(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(
        UserError, match="holds no head that can be used: Expecting|that can be used: not"
    ):
        load_head(folder)


# --- where heads are


@pytest.mark.parametrize("location", ["/nowhere/at/all", "nowhere", "nobody/no-head"])
def test_a_missing_folder_is_a_user_error_with_a_remedy(location, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = rf"(no head folder '{location}'|'{location}' is no local folder).*head=latest"
    with pytest.raises(UserError, match=said):
        load_head(location)


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(5)


def save_at(folder, age, revision="r2"):
    save_head(new_head(replace(CONFIG, draft={"id": "d", "revision": revision})), folder, inputs())
    stamp = 2_000_000_000 - age
    # An evaluation writes into the config, which makes no head newer
    os.utime(folder / "model.safetensors", (stamp, stamp))
    return folder


def test_latest_is_the_newest_head_for_the_pairs_draft(tmp_path, pair):
    save_at(tmp_path / "train" / "2031-01-01" / "heads" / "a", age=30)
    newest = save_at(tmp_path / "train" / "2030-01-01" / "heads" / "b", age=20)
    save_at(tmp_path / "sweep" / "x" / "3" / "heads" / "c", age=40)
    save_at(tmp_path / "train" / "2032-01-01" / "heads" / "other", age=10, revision="r9")
    assert latest_head(tmp_path, pair) == newest
    deeper = save_at(tmp_path / "sweep" / "x" / "4" / "heads" / "d", age=5)
    assert latest_head(tmp_path, pair) == deeper
    assert latest_head(tmp_path, replace(pair, draft_revision="r9")).name == "other"


def test_latest_leaves_out_heads_of_runs_that_were_not_finished(tmp_path, pair):
    """Of an interrupted learning curve the newest head may be one of a sixteenth of the prompts."""
    whole = save_at(tmp_path / "head" / "2030" / "heads" / "a", age=30)
    part = save_at(tmp_path / "curve" / "2031" / "1000" / "heads" / "a", age=20)
    curve = part.parents[2]
    for folder, finished in ((whole.parents[1], True), (part.parents[1], True), (curve, False)):
        (folder / "run.json").write_text(json.dumps({"identity": "x", "finished": finished}))
    assert latest_head(tmp_path, pair) == whole
    (curve / "run.json").write_text(json.dumps({"identity": "x", "finished": True}))
    assert latest_head(tmp_path, pair) == part


def test_latest_without_a_head_says_how_to_train_one(tmp_path, pair):
    message = r"no head for draft tiny-draft with target tiny-target under .*{}; train one with"
    with pytest.raises(UserError, match=message.format("outputs")):
        latest_head(tmp_path / "outputs", pair)
    for number in range(2):
        save_at(tmp_path / "heads" / str(number), age=number, revision="r9")
    with pytest.raises(UserError, match=message.format(r"\(2 for other pairs\)")):
        latest_head(tmp_path, pair)
