"""The prompts that a head was trained on: a file of its folder that is written, copied with the
head and checked.
"""

import hashlib
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from specheads.commands.export import run
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.heads.head_folder import LEARNED, store_in_config
from specheads.heads.train_prompts import FILE, TrainPrompts, text_hash

TRAIN = ["def f(x):\n", "Say hello.\n\nTo all.", "def f(x):\n"]
DEV = ["Of what?"]


def new_head(learned):
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(hidden_size=8, depth=1))
    for tensor in head.state_dict().values():
        tensor.add_(0.3 * torch.randn_like(tensor))
    head.train_prompts = learned
    return head


@pytest.fixture
def folder(tmp_path):
    return save_head(new_head(TrainPrompts.of(TRAIN, DEV)), tmp_path / "head")


def test_words_are_kept_once(folder):
    digits = [
        hashlib.sha256(words.encode()).digest()[:8] for words in ("def f(x):", "say hello. to all.")
    ]
    kept = load_file(folder / FILE)
    assert kept["train"].tolist() == sorted(
        int.from_bytes(digest, "big", signed=True) for digest in digits
    )
    learned = load_head(folder).train_prompts
    assert learned.train.tolist() == kept["train"].tolist() and learned.dev.tolist() == [
        text_hash(DEV[0])
    ]


def test_white_space_and_case_of_templates_do_not_matter():
    texts = [
        f"Say it.{gap}{given}"
        for gap in ("\n", "\n\n", " \t")
        for given in ("All of it", "all of it\n")
    ]
    assert len({text_hash(text) for text in texts}) == 1
    assert text_hash("Say it.") != text_hash("Say it!") != text_hash("Sayit.")


def test_they_are_saved_with_the_head(folder, tmp_path):
    load_head(folder).save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (folder / FILE).read_bytes()


def test_a_head_that_replaces_another_does_not_take_its_prompts(folder):
    save_head(new_head(None), folder)
    assert not (folder / FILE).exists() and load_head(folder).train_prompts is None


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"train": torch.zeros(3, dtype=torch.int64)},
        {"dev": torch.zeros(1), "train": torch.zeros(2)},
        {name: torch.zeros(3, 1, dtype=torch.int64) for name in ("train", "dev")},
        {name: torch.zeros(1, dtype=torch.int64) for name in ("train", "dev", "test")},
    ],
)
def test_a_file_that_holds_something_else_is_refused(folder, tensors):
    save_file(tensors, folder / FILE)
    with pytest.raises(UserError, match=f"{FILE} must hold lists train and dev of int64"):
        load_head(folder)


def test_a_description_shows_their_number(folder):
    assert "trained on 2, calibrated on 1" in run([f"head={folder}"])
    save_head(new_head(None), folder)
    assert "prompts         not known" in run([f"head={folder}"])


def remove(folder):
    (folder / FILE).unlink()


def take_that_of_another_head(folder):
    TrainPrompts.of(TRAIN[:1], DEV).write(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(remove, "it has no train_prompts"), (take_that_of_another_head, "another head's train_prom")],
)
def test_a_file_that_the_config_names_must_be_there(folder, damage, message):
    config = json.loads((folder / "config.json").read_text())
    damage(folder)
    for read in (load_head, partial(store_in_config, recommended=None)):
        with pytest.raises(UserError, match=message):
            read(folder)
    # as the message says, and as heads of earlier versions are
    del config["train"][LEARNED]
    (folder / "config.json").write_text(json.dumps(config))
    load_head(folder)


def test_dev_prompts_of_a_later_calibration_fit(folder):
    store_in_config(folder, dev_texts=["Another?"], recommended=None)
    assert load_head(folder).train_prompts.dev.tolist() == [text_hash("Another?")]
