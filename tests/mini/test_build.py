import json

from transformers import AutoTokenizer

from specheads.embedded.corpus import is_permissive
from specheads.mini.build import MINI


def test_the_target_has_the_size_that_was_asked_for():
    num_weights = MINI.new_model("target", 0).num_parameters()
    assert 12_000_000 <= num_weights <= 20_000_000
    assert 2 * num_weights <= 40_000_000 - 20_000  # bytes in 16 bits, and the names of tensors


def test_it_reads_text_as_nano_does(nano):
    text = "def f(x):\n    return x ** 2\n"
    assert AutoTokenizer.from_pretrained(MINI.tokenizer)(text)["input_ids"] == nano.tokenizer(text)["input_ids"]


def test_its_text_is_pinned_and_permissive():
    rows = json.loads(MINI.manifest.read_text())
    assert rows[0]["name"] == "Python standard library"
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["functions"] > 0 and len(row["sha256"]) == 64 and is_permissive(row["licence"])
    assert sum(row["functions"] for row in rows) > 50_000
