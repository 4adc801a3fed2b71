"""The configured prompt sets on real rows: SPECHEADS_DATA names a folder with alpaca.jsonl,
gsm8k.jsonl and humaneval.jsonl.
"""

import json
import os
from pathlib import Path

import pytest

from specheads.commands.compose import command_config, source_of


@pytest.fixture
def real():
    """A function from a prompt set's name to its source on a folder of real rows, where there is
    one.
    """
    folder = Path(os.environ.get("SPECHEADS_DATA", "no folder"))
    if not folder.is_dir():
        pytest.skip(
            "name a folder with alpaca.jsonl, gsm8k.jsonl and humaneval.jsonl in SPECHEADS_DATA"
        )

    def configured(name):
        return source_of(
            command_config("data_gen", [f"data={name}", f"data.path={folder / name}.jsonl"])
        )

    return configured


@pytest.mark.parametrize("name", ["alpaca", "gsm8k", "humaneval"])
@pytest.mark.parametrize("chats", [True, False])
def test_real_prompts_fill_every_split_and_nano_reads_them(real, nano, name, chats):
    source = real(name)
    prompts = source.load(chats)
    sizes = {split: [p.split for p in prompts].count(split) for split in ("train", "dev", "test")}
    # Prompts are as many as there are rows or as were asked for, and splits in proportion to what
    # was asked for.
    asked = {"train": source.num_train, "dev": source.num_dev, "test": source.num_test}
    assert sum(sizes.values()) == min(len(rows_of(source)), sum(asked.values()))
    for split, size in sizes.items():
        assert size == pytest.approx(
            asked[split] * sum(sizes.values()) / sum(asked.values()), abs=1
        )
    for prompt in prompts[:: len(prompts) // 20]:
        assert nano.decode(nano.encode_instruction(prompt.text)) == prompt.text


def rows_of(source):
    """Return the different rows: of those that repeat a prompt, the first."""
    rows = [json.loads(line) for line in Path(source.path).read_text().splitlines()]
    first: dict[tuple, dict] = {}
    for row in rows:
        first.setdefault(
            tuple(row.get(name) for name in ("instruction", "input", "question", "prompt")), row
        )
    return list(first.values())
