"""Heads are found with what they were trained under."""

import logging
import os

import pytest
from fakes import tiny_pair

from specheads import AcceptanceHead, HeadConfig, Warp, save_head
from specheads.heads.head import find_heads


@pytest.mark.parametrize(
    ("warp", "other"),
    [
        (Warp(top_k=50), ""),
        (Warp(0.6, 20), "{'temperature': 0.6, 'top_k': 20, 'top_p': 1.0}"),
        (Warp(1.0, 50, min_p=0.1), "'min_p': 0.1}"),
    ],
)
def test_a_warp_that_a_head_was_not_trained_under_is_named(warp, other, tmp_path, caplog):
    pair = tiny_pair()
    draft = {"id": pair.draft_id, "revision": pair.draft_revision}
    before_min_p = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    config = HeadConfig(
        pair.draft_lm.hidden_size, vocab_size=pair.vocab_size, draft=draft, warp=before_min_p
    )
    save_head(AcceptanceHead(config).eval(), tmp_path / "head")
    with caplog.at_level(logging.WARNING):
        find_heads(str(tmp_path / "head"), pair, tmp_path, warp)
    said = [message for message in caplog.messages if "was trained under" in message]
    assert len(said) == bool(other) and all(
        f"{other}; the keys warp.* give others" in message for message in said
    )


def test_latest_are_all_heads_of_the_newest_training(tmp_path):
    pair = tiny_pair()
    draft, target = (
        {"revision": getattr(pair, f"{role}_revision")} for role in ("draft", "target")
    )
    for number, (run, name) in enumerate((("old", "deep"), ("new", "deep"), ("new", "shallow"))):
        config = HeadConfig(pair.draft_lm.hidden_size, depth=number, draft=draft, target=target)
        folder = save_head(AcceptanceHead(config).eval(), tmp_path / run / "heads" / name)
        os.utime(folder / "model.safetensors", (number, number))
    found = find_heads("latest", pair, tmp_path, Warp())
    assert {name: located.head.config.depth for name, located in found.items()} == {
        "deep": 1,
        "shallow": 2,
    }
