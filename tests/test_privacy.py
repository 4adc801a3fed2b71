"""The home folder is named by ~.

`integrations/test_wheel.py` looks for it in all that commands write and print.
"""

import os

import pytest
import torch
from commands import ROOT

from specheads import AcceptanceHead, HeadConfig, UserError, Warp, load_head, load_pair
from specheads.heads.head import find_heads, save_head
from specheads.storage.files import without_home


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ada", "~"),
        ("into /home/ada/runs, head=/home/ada", "into ~/runs, head=~"),
        (
            "/home/adam/runs /mnt/home/ada/runs /home/ada-2",
            "/home/adam/runs /mnt/home/ada/runs /home/ada-2",
        ),
        ("file:///home/ada/x", "file://~/x"),
    ],
)
def test_the_home_folder_is_left_out_and_no_other(monkeypatch, text, shown):
    monkeypatch.setenv("HOME", "/home/ada")
    assert without_home(text) == shown


def test_a_link_to_the_home_folder_is_left_out_too(monkeypatch, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "ada").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    assert without_home(f"{tmp_path}/ada/a {tmp_path}/disk/b") == "~/a ~/b"
    monkeypatch.setenv("HOME", os.sep)
    assert without_home("/a /b") == "/a /b"


def test_models_and_heads_are_found_below_the_home_folder(monkeypatch, tmp_path, nano):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "nano").symlink_to(ROOT / "specheads" / "nano")
    pair = load_pair(
        draft="~/nano/draft",
        target=tmp_path / "nano" / "target",
        tokenizer="~/nano",
        dtype="float32",
    )
    assert (pair.draft_id, pair.target_id) == ("~/nano/draft", "~/nano/target")
    assert (pair.draft_revision, pair.target_revision) == (
        nano.draft_revision,
        nano.target_revision,
    )
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size, depth=0))
    save_head(head, tmp_path / "head", torch.randn(4, head.config.input_size))
    assert list(find_heads("~/head", pair, tmp_path, Warp())) == ["head"]
    assert load_head("~/head").config == head.config
    with pytest.raises(UserError, match="there is no head folder '~/nowhere'"):
        load_head("~/nowhere")
