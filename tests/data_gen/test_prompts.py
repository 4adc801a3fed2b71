import csv
import json
from collections import defaultdict

import pytest

from data_gen.prompts import DatasetSource, NanoSource, Prompt, unique
from data_gen.run import prompts_fingerprint
from specheads.errors import UserError
from specheads.nano import corpus

ALL = 10**6


@pytest.fixture(scope="module")
def library():
    """Both held-out sides of this machine's standard library, read once."""
    return {side: list(corpus.standard_library(side)) for side in ("dev", "test")}


@pytest.fixture
def read_once(library, monkeypatch):
    monkeypatch.setattr(corpus, "standard_library", lambda side: iter(library[side]))
    return library


def function(prompt, source):
    return corpus.Function(prompt=prompt, body="    return 1\n", source=source)


# --- NanoSource


def test_nano_prompts_come_from_files_on_the_held_out_side_of_their_split(read_once):
    sources = {side: defaultdict(set) for side in read_once}
    for side, functions in read_once.items():
        for f in functions:
            sources[side][f.prompt].add(f.source)
    prompts = list(NanoSource(ALL, ALL, ALL).load())
    assert {prompt.split for prompt in prompts} == {"train", "dev", "test"}
    for prompt in prompts:
        side = "test" if prompt.split == "test" else "dev"
        files = sources[side][prompt.text]
        assert files and {corpus.split_of(file) for file in files} == {side}


def test_nano_train_and_dev_prompts_come_from_different_files(read_once):
    sources = defaultdict(set)
    for f in read_once["dev"]:
        sources[f.prompt].add(f.source)
    files = defaultdict(set)
    for prompt in NanoSource(ALL, ALL, 0).load():
        if len(sources[prompt.text]) == 1:  # a prompt that two files share does not say which one it came from
            files[prompt.split] |= sources[prompt.text]
    assert len(files["train"]) > len(files["dev"]) > 0
    assert not files["train"] & files["dev"]


def test_every_distinct_held_out_function_is_available(read_once):
    prompts = list(NanoSource(ALL, ALL, ALL).load())
    assert {p.text for p in prompts if p.split == "test"} == {f.prompt for f in read_once["test"]}
    assert {p.text for p in prompts if p.split != "test"} == {f.prompt for f in read_once["dev"]}


def test_nano_order_is_the_same_every_time_and_a_smaller_request_is_its_beginning(read_once):
    large = list(NanoSource(60, 40, 20).load())
    assert large == list(NanoSource(60, 40, 20).load())
    small = list(NanoSource(6, 4, 2).load())
    assert small == [*large[:6], *large[60:64], *large[100:102]]
    assert [p.split for p in small] == ["train"] * 6 + ["dev"] * 4 + ["test"] * 2


def test_nano_order_does_not_depend_on_the_order_of_files(library, monkeypatch):
    monkeypatch.setattr(corpus, "standard_library", lambda side: iter(library[side]))
    forward = list(NanoSource(50, 50, 50).load())
    monkeypatch.setattr(corpus, "standard_library", lambda side: reversed(library[side]))
    assert list(NanoSource(50, 50, 50).load()) == forward


def test_nano_gives_a_prompt_once_per_split(monkeypatch):
    twice = [function("def f():\n", "a.py"), function("def f():\n", "a.py"), function("def g():\n", "a.py")]
    monkeypatch.setattr(corpus, "standard_library", lambda side: iter(twice))
    for split in ("train", "dev", "test"):
        texts = [p.text for p in NanoSource(ALL, ALL, ALL).load() if p.split == split]
        assert len(texts) == len(set(texts))
    assert sorted(p.text for p in NanoSource(0, 0, ALL).load()) == ["def f():\n", "def g():\n"]


def fingerprint_of(source):
    return prompts_fingerprint(unique(source.load()))


def test_nano_fingerprint_follows_the_prompts_and_nothing_else(read_once, monkeypatch):
    fingerprint = fingerprint_of(NanoSource(9, 8, 7))
    assert fingerprint == fingerprint_of(NanoSource(9, 8, 7))
    others = [fingerprint_of(NanoSource(8, 8, 7)), fingerprint_of(NanoSource(9, 7, 7)), fingerprint_of(NanoSource(9, 8, 6))]
    first = next(NanoSource(9, 8, 7).load()).text
    changed = {side: [f for f in functions if f.prompt != first] for side, functions in read_once.items()}
    monkeypatch.setattr(corpus, "standard_library", lambda side: iter(changed[side]))
    others.append(fingerprint_of(NanoSource(9, 8, 7)))
    assert len({fingerprint, *others}) == 5


# --- DatasetSource


ROWS = [{"instruction": f"say {word}", "input": str(i)} for i, word in enumerate(["one", "two", "three", "four", "five", "six"])]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(path, template="{instruction}", counts=(3, 2, 1)):
    return DatasetSource(path, template, "train", *counts)


def test_rows_of_a_jsonl_file_fill_the_splits_in_order(tmp_path):
    prompts = list(source(jsonl(tmp_path, ROWS), "{instruction}\n{input}").load())
    assert [p.split for p in prompts] == ["train"] * 3 + ["dev"] * 2 + ["test"]
    assert [p.text for p in prompts] == [f"{row['instruction']}\n{row['input']}" for row in ROWS]


def test_a_csv_file_is_read_too(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["instruction", "input"])
        writer.writeheader()
        writer.writerows(ROWS)
    assert [p.text for p in source(str(path), "{input}: {instruction}").load()] == [
        f"{i}: {r['instruction']}" for i, r in enumerate(ROWS)
    ]


def test_a_text_file_has_one_prompt_per_line(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("first\nsecond\nthird\n")
    assert [p.text for p in source(str(path), "{text}", (1, 1, 1)).load()] == ["first", "second", "third"]


def test_literal_braces_survive_the_template(tmp_path):
    assert next(source(jsonl(tmp_path, ROWS), "{{x}} {instruction}").load()).text == "{x} say one"


def test_only_as_many_rows_as_asked_for_are_used(tmp_path):
    prompts = list(source(jsonl(tmp_path, ROWS), counts=(1, 0, 2)).load())
    assert [(p.split, p.text) for p in prompts] == [("train", "say one"), ("test", "say two"), ("test", "say three")]


@pytest.mark.parametrize(
    ("counts", "found"),
    [((4, 4, 4), (4, 2, 0)), ((6, 0, 0), (6, 0, 0)), ((3, 3, 0), (3, 3, 0)), ((9, 1, 1), (6, 0, 0)), ((2, 2, 9), (2, 2, 2))],
)
def test_a_short_data_set_leaves_the_last_splits_short(tmp_path, counts, found):
    prompts = list(source(jsonl(tmp_path, ROWS), counts=counts).load())
    assert [p.split for p in prompts] == ["train"] * found[0] + ["dev"] * found[1] + ["test"] * found[2]


def test_surrounding_blanks_are_stripped_and_empty_rows_left_out(tmp_path):
    rows = [{"instruction": "  a \n"}, {"instruction": " \n"}, {"instruction": "b"}, {"instruction": "c"}]
    assert [p.text for p in source(jsonl(tmp_path, rows), "{instruction}\n", (3, 0, 0)).load()] == ["a", "b"]


def test_a_prompts_id_is_the_hash_of_its_text(tmp_path):
    path = jsonl(tmp_path, [{"instruction": "hello"}])
    assert next(source(path).load()).prompt_id == "2cf24dba5fb0a30e"  # the beginning of SHA-256("hello")
    assert int("2cf24dba5fb0a30e", 16) < 2**64


def test_a_field_that_the_data_set_lacks_is_named_with_those_it_has(tmp_path):
    path = jsonl(tmp_path, ROWS)
    with pytest.raises(UserError, match=r"'question'.*rows\.jsonl has instruction, input"):
        list(source(path, "{instruction} {question}").load())


def test_a_missing_file_is_a_user_error_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.jsonl.*could not be loaded.*data=nano"):
        list(source(str(tmp_path / "nothing.jsonl")).load())


def test_an_unreachable_hub_data_set_is_a_user_error_with_a_remedy():
    with pytest.raises(UserError, match=r"'nobody/nothing' could not be loaded.*data=nano"):
        list(source("nobody/nothing").load())


def test_a_file_that_is_no_json_is_a_user_error(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"instruction": "a"}\n{"instruction": ')
    with pytest.raises(UserError, match=r"broken\.jsonl.*could not be loaded"):
        list(source(str(path)).load())


def test_dataset_fingerprint_follows_rows_template_and_counts(tmp_path):
    path = jsonl(tmp_path, ROWS)
    fingerprint = fingerprint_of(source(path))
    assert fingerprint_of(source(path)) == fingerprint
    others = [
        fingerprint_of(source(path, "{input}")),
        fingerprint_of(source(path, counts=(2, 2, 1))),
        fingerprint_of(source(path, counts=(3, 1, 1))),
        fingerprint_of(source(path, counts=(3, 2, 0))),
        fingerprint_of(source(jsonl(tmp_path, ROWS[::-1]))),
    ]
    assert len({fingerprint, *others}) == 6


# --- unique


REPEATED = [
    ("a", "train"),
    ("b", "train"),
    ("a", "train"),
    ("b", "dev"),
    ("c", "dev"),
    ("a", "test"),
    ("c", "test"),
    ("d", "test"),
]


def prompts_of(rows):
    return [Prompt(prompt_id=text, split=split, text=text) for text, split in rows]


def test_unique_keeps_a_text_in_the_first_split_that_has_it():
    assert {p.text: p.split for p in unique(iter(prompts_of(REPEATED)))} == {"a": "train", "b": "train", "c": "dev", "d": "test"}
    assert len(unique(prompts_of(REPEATED))) == 4


def test_unique_keeps_the_order_in_which_texts_first_appear():
    assert [p.text for p in unique(prompts_of(REPEATED))] == ["a", "b", "c", "d"]
