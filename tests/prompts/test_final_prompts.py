"""The final split: prompts on which nothing was chosen, loaded on request only, and never part of a
data cache.
"""

import json
from pathlib import Path

import datasets
import pytest
from omegaconf import OmegaConf

from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.pair.sampling import Warp
from specheads.prompts import sources as nano_source
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.prompt import FINAL, Prompt
from specheads.prompts.sources import NUM_PARTS, NUM_READ, NanoSource

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library():
    """Both held-out sides: 2,000 functions of 20 test files, one of which has 600, and some of dev
    files.
    """
    test = [
        function(f"def f{n}():\n", "large.py" if n < 600 else f"file{n % 19}.py")
        for n in range(2000)
    ]
    dev = [function(f"def d{n}():\n", f"dev{n % 40}.py") for n in range(200)]
    shared = [function(f"def f{n}():\n", "dev0.py") for n in range(600, 1500)]
    return {"dev": dev + shared, "test": test}


@pytest.fixture(autouse=True)
def read_once(library, monkeypatch):
    monkeypatch.setattr(nano_source, "standard_library", lambda side: iter(library[side]))


def function(prompt, source):
    return nano_source.Function(prompt=prompt, body="    return 1\n", source=source)


def final(part, num_final=None, num_test=300):
    return [
        p
        for p in NanoSource(1600, 200, num_test, num_final, part).load(chats=False)
        if p.split == FINAL
    ]


def test_parts_share_no_prompt_and_hold_none_that_was_read_or_is_trained_on(library):
    parts = [final(part) for part in range(NUM_PARTS)]
    ids = [prompt.prompt_id for part in parts for prompt in part]
    assert len(set(ids)) == len(ids) and all(parts)
    read = [prompt.prompt_id for prompt in NanoSource(0, 0, NUM_READ).load(chats=False)]
    assert len(read) == NUM_READ and not set(ids) & set(read)
    assert not {prompt.text for part in parts for prompt in part} & {
        item.prompt for item in library["dev"]
    }
    assert {prompt.prompt_id for prompt in final(list(range(NUM_PARTS)))} == set(ids)


def test_without_a_part_there_is_no_final_prompt_and_all_else_is_the_same():
    plain = list(NanoSource(1600, 200, 300).load(chats=False))
    assert {prompt.split for prompt in plain} == {"train", "dev", "test"}
    assert plain == [
        p for p in NanoSource(1600, 200, 300, None, 1).load(chats=False) if p.split != FINAL
    ]


@pytest.mark.parametrize("part", [10, -1, "all", 0.5, True, [1, 1], [0, 12]])
def test_an_unknown_part_is_refused(part):
    with pytest.raises(
        UserError,
        match=r"data\.final_part=.* must be a part of the final split: a number from 0 to 9",
    ):
        NanoSource(1, 1, 1, None, part)


@pytest.mark.parametrize("part", [None, 2])
def test_more_test_prompts_than_come_before_the_final_ones_are_refused(part):
    with pytest.raises(
        UserError,
        match=r"data\.num_test=301 reaches into the final.*at most 300",
    ):
        NanoSource(1, 1, NUM_READ + 1, None, part)
    NanoSource(1, 1, NUM_READ, None, part)


@pytest.mark.parametrize("changes", [{}, {"num_final": 0, "final_part": 1}, {"num_final": 50}])
def test_a_final_evaluation_without_final_prompts_names_the_key(changes):
    with pytest.raises(UserError, match=r"split=final needs final prompts.*data\.final_part=9"):
        NanoSource(1, 1, 1, **changes).check_final()
    NanoSource(1, 1, 1, None, OmegaConf.create([0, 3])).check_final()


# --- data sets


def rows_source(tmp_path, counts, num_final, num_rows=20, **more):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(num_rows)))
    return DatasetSource(
        str(path), None, "train", None, "{text}", None, *counts, num_final=num_final, **more
    )


def splits_of(source):
    numbers = {}
    for prompt in source.load(chats=True):
        numbers.setdefault(prompt.split, []).append(int(prompt.text.split()[1]))
    return numbers


def test_final_rows_follow_the_test_rows(tmp_path):
    assert splits_of(rows_source(tmp_path, (5, 3, 2), 4)) == {
        "train": [0, 1, 2, 3, 4],
        "dev": [5, 6, 7],
        "test": [8, 9],
        "final": [10, 11, 12, 13],
    }
    assert FINAL not in splits_of(rows_source(tmp_path, (5, 3, 2), 0))


def test_final_rows_of_a_test_split_follow_its_test_rows(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(9))
        )
    tables = {
        name: datasets.Dataset.from_json(str(tmp_path / f"{name}.jsonl"))
        for name in ("train", "test")
    }
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "saved")
    source = DatasetSource(
        str(tmp_path / "saved"), None, "train", "test", "{text}", None, 2, 1, 3, num_final=2
    )
    assert splits_of(source) == {"train": [0, 1], "dev": [2], "test": [0, 1, 2], "final": [3, 4]}


# --- data caches


def test_data_caches_hold_no_final_prompt_and_do_not_depend_on_them(nano, tmp_path):
    settings = DataGeneration(warp=Warp(), max_new_tokens=2)
    texts = ("def a():\n", "def b():\n")
    prompts = [
        Prompt(f"{n:016x}", split, text)
        for n, (split, text) in enumerate(zip(("train", FINAL), texts, strict=True))
    ]

    class Source:
        def __init__(self, some):
            self.some = some

        def load(self, chats, responses=False):
            return self.some

    made = [
        generate_data(nano, Source(some), settings, tmp_path) for some in (prompts, prompts[:1])
    ]
    assert made[0] == made[1]
    assert [path.name for path in made[0].glob("*.parquet")] == ["train-00000.parquet"]


def test_the_list_of_parts_that_were_read_is_valid():
    for entry in json.loads((ROOT / "benchmarks" / "final_parts.json").read_text()):
        assert entry.keys() == {"part", "by", "command", "date", "commit"} and entry[
            "part"
        ] in range(NUM_PARTS)
