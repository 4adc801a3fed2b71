import ast
import copy
import itertools
import json
import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, DatasetDict
from fakes import tiny_pair

from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.prompts import sources as prompt_sources
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.prompt import (
    SPLITS,
    Prompt,
    ResponseLimits,
    encode_prompts,
    prompts_fingerprint,
    scaled_down,
    unique,
)
from specheads.prompts.sources import NUM_READ, NanoSource

ALL = 10**6


@pytest.fixture(scope="module")
def library():
    """Both held-out sides of this machine's standard library, read once."""
    return {side: list(prompt_sources.standard_library(side)) for side in ("dev", "test")}


@pytest.fixture
def read_once(library, monkeypatch):
    monkeypatch.setattr(prompt_sources, "standard_library", lambda side: iter(library[side]))
    return library


def function(prompt, source):
    return prompt_sources.Function(prompt=prompt, body="    return 1\n", source=source)


# --- NanoSource


def test_nano_prompts_come_from_files_on_the_held_out_side_of_their_split(read_once):
    sources = {side: defaultdict(set) for side in read_once}
    for side, functions in read_once.items():
        for f in functions:
            sources[side][f.prompt].add(f.source)
    prompts = list(NanoSource(ALL, ALL, NUM_READ).load(chats=False))
    assert {prompt.split for prompt in prompts} == {"train", "dev", "test"}
    for prompt in prompts:
        side = "test" if prompt.split == "test" else "dev"
        files = sources[side][prompt.text]
        assert files and {prompt_sources.split_of(file) for file in files} == {side}


def test_nano_train_and_dev_prompts_come_from_different_files(read_once):
    sources = defaultdict(set)
    for f in read_once["dev"]:
        sources[f.prompt].add(f.source)
    files = defaultdict(set)
    for prompt in NanoSource(ALL, ALL, 0).load(chats=False):
        # A prompt that two files share does not say which one it came from.
        if len(sources[prompt.text]) == 1:
            files[prompt.split] |= sources[prompt.text]
    assert len(files["train"]) > len(files["dev"]) > 0
    assert not files["train"] & files["dev"]


def test_nano_order_is_the_same_every_time_and_a_smaller_request_is_its_beginning(read_once):
    large = list(NanoSource(60, 40, 20).load(chats=False))
    assert large == list(NanoSource(60, 40, 20).load(chats=False))
    small = list(NanoSource(6, 4, 2).load(chats=False))
    assert small == [*large[:6], *large[60:64], *large[100:102]]
    assert [p.split for p in small] == ["train"] * 6 + ["dev"] * 4 + ["test"] * 2


def fingerprint_of(source):
    return prompts_fingerprint(unique(source.load(chats=False)))


# --- DatasetSource


ROWS = [
    {"instruction": f"say {word}", "input": str(i)}
    for i, word in enumerate(["one", "two", "three", "four", "five", "six"])
]
TEST_ROWS = [{"instruction": f"tell {word}", "input": ""} for word in ("seven", "eight")]


def jsonl(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(
    path,
    template="{instruction}",
    counts=(3, 2, 1),
    completion_template=None,
    name=None,
    split="train",
    test_split=None,
):
    return DatasetSource(path, name, split, test_split, template, completion_template, *counts)


def pairs(prompts):
    return [(prompt.split, prompt.text) for prompt in prompts]


def test_rows_fill_the_splits_in_order(tmp_path):
    prompts = source(jsonl(tmp_path, ROWS), "{instruction}\n{input}").load(chats=True)
    assert [p.split for p in prompts] == ["train"] * 3 + ["dev"] * 2 + ["test"]
    assert [p.text for p in prompts] == [f"{row['instruction']}\n{row['input']}" for row in ROWS]


@pytest.mark.parametrize(("chats", "text"), [(True, "User: say one"), (False, "say one:\n")])
def test_pairs_that_do_not_chat_get_the_completion_template(tmp_path, chats, text):
    made = source(
        jsonl(tmp_path, ROWS), "User: {instruction}", completion_template="{instruction}:\n"
    ).load(chats)
    assert made[0].text == text


def test_rows_without_text_are_left_out_and_counted_once(tmp_path, caplog):
    rows = [
        {"instruction": "a"},
        {"instruction": " \n"},
        {"instruction": None},
        {"other": "x"},
        {"instruction": "b"},
        {"instruction": "c"},
    ]
    with caplog.at_level(logging.INFO):
        prompts = source(jsonl(tmp_path, rows), counts=(1, 1, 0)).load(chats=True)
    assert pairs(prompts) == [("train", "a"), ("dev", "b")]
    assert [message for message in caplog.messages if "left out" in message] == [
        f"data: 3 of 5 rows of {tmp_path}/rows.jsonl left out: no text in fields of data.template"
    ]


def test_a_prompts_id_is_the_hash_of_its_text(tmp_path):
    path = jsonl(tmp_path, [{"instruction": "hello"}])
    # The beginning of SHA-256("hello").
    assert source(path, counts=(1, 0, 0)).load(chats=True)[0].prompt_id == "2cf24dba5fb0a30e"
    assert int("2cf24dba5fb0a30e", 16) < 2**64


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


def test_repeated_rows_are_left_out_before_splits_are_filled(tmp_path, caplog):
    path = jsonl(tmp_path, [*ROWS[:3], *ROWS[:3], *ROWS[3:]])
    with caplog.at_level(logging.INFO):
        made = source(path).load(chats=True)
    assert (
        pairs(made) == pairs(source(jsonl(tmp_path, ROWS, "once.jsonl")).load(chats=True))
        and unique(made) == made
    )
    assert caplog.messages == [f"data: 3 prompts of {path} left out: earlier ones are the same"]


def test_test_prompts_are_none_of_the_others(tmp_path):
    folder = str(tmp_path / "set")
    DatasetDict(
        train=Dataset.from_list(ROWS), test=Dataset.from_list([*ROWS[:4], *TEST_ROWS])
    ).save_to_disk(folder)
    made = source(folder, test_split="test", counts=(2, 1, 9)).load(chats=True)
    assert [prompt.text for prompt in made if prompt.split == "test"] == [
        "say four",
        "tell seven",
        "tell eight",
    ]
    with pytest.raises(UserError, match="gives no prompt: 3 are prompts of an earlier split"):
        source(folder, test_split="test[:3]", counts=(2, 1, 9)).load(chats=True)


# --- short data


def test_any_short_data_is_used_up_and_gives_no_split_more_than_asked_for():
    for counts in itertools.product((0, 1, 2, 7, 30), repeat=3):
        for available in range(1, sum(counts)):
            scaled = scaled_down(counts, available)
            assert sum(scaled) == available
            assert all(0 <= share <= count for share, count in zip(scaled, counts, strict=True))
            assert all(scaled[i] for i in range(3) if counts[i]) or available < sum(
                map(bool, counts)
            )


# --- splits, hub data sets and folders


@pytest.fixture
def hub(monkeypatch):
    """A hub that has `someone/set` with a train and a test split.

    The list collects what is asked of it.
    """
    asked = []

    def load_dataset(path, name=None, **kwargs):
        assert not kwargs
        asked.append((path, name))
        return DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(TEST_ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_test_prompts_come_from_their_own_split_and_each_split_shrinks_by_itself(hub, caplog):
    with caplog.at_level(logging.INFO):
        made = source("someone/set", counts=(2, 1, 9), test_split="test").load(chats=True)
    assert pairs(made) == [
        ("train", "say one"),
        ("train", "say two"),
        ("dev", "say three"),
        ("test", "tell seven"),
        ("test", "tell eight"),
    ]
    assert caplog.messages[-1].endswith("has 2 prompts, not the 9 asked for; in proportion: 2 test")


@pytest.mark.parametrize(
    ("split", "texts"),
    [
        ("train", ["one", "two", "three", "four", "five", "six"]),
        ("train[:2]", ["one", "two"]),
        ("train[-1:]", ["six"]),
        ("train[50%:]", ["four", "five", "six"]),
        ("train[:1]+train[2:3]", ["one", "three"]),
    ],
)
@pytest.mark.parametrize("kind", ["hub", "file", "folder"])
def test_slices_of_a_split_work_everywhere(hub, tmp_path, kind, split, texts):
    path = {"hub": "someone/set", "file": jsonl(tmp_path, ROWS), "folder": str(tmp_path / "saved")}[
        kind
    ]
    if kind == "folder":
        Dataset.from_list(ROWS).save_to_disk(path)
    made = source(path, split=split, counts=(len(texts), 0, 0)).load(chats=True)
    assert [p.text for p in made] == [f"say {text}" for text in texts]


@pytest.mark.parametrize("splits", [False, True])
def test_a_damaged_offset_of_a_saved_folder_is_a_message(tmp_path, splits):
    """Reading the row would end the process: what the offset points at is not in the file."""
    folder = tmp_path / "saved"
    texts = ["a" * 7, "b" * 11, "c" * 13]
    rows = Dataset.from_dict({"a": texts})
    (DatasetDict(train=rows) if splits else rows).save_to_disk(folder)
    (file,) = folder.rglob("*.arrow")
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 7, 18, 31))
    content = file.read_bytes()
    assert content.count(offsets) == 1
    file.write_bytes(
        content.replace(offsets, offsets[:8] + (2**31 - 1).to_bytes(4, "little") + offsets[12:])
    )
    with pytest.raises(UserError, match=r"data\.path='.*saved'"):
        source(str(folder), "{a}", counts=(3, 0, 0)).load(chats=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"split": "trian"},
            (
                r"data\.split='trian' cannot be taken from someone/set: Unknown split .*\['train',"
                r" 'test'\]\.$"
            ),
        ),
        (
            {"test_split": "validation"},
            r"data\.test_split='validation' cannot be taken .*\['train', 'test'\]\.$",
        ),
        ({"split": "train[9:]"}, r"data\.split='train\[9:\]' holds no rows of someone/set"),
    ],
)
def test_a_split_that_is_not_there_is_a_user_error(hub, changes, message):
    with pytest.raises(UserError, match=message):
        source("someone/set", **changes).load(chats=True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ConnectionError("Couldn't reach 'someone/set' on the Hub (X)\nmore"),
            r"reach 'someone/set' on the Hub \(X\)\. .*data\.path=<file>.*HF_HOME",
        ),
        (
            datasets.exceptions.DatasetNotFoundError("it doesn't exist."),
            r"no local file or folder.*it doesn't exist\. ",
        ),
        (
            ValueError("BuilderConfig 'mian' not found. Available: ['main']"),
            r"data\.name=mian.*Available: \['main'\]\.",
        ),
        (
            RuntimeError("Dataset scripts are no longer supported"),
            "scripts are no longer supported.*data.path=<file>",
        ),
    ],
)
def test_a_hub_data_set_that_cannot_be_loaded_is_a_user_error(monkeypatch, error, message):
    def load_dataset(*args):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=message) as caught:
        source("someone/set", name="mian").load(chats=True)
    assert "\n" not in str(caught.value)


# --- what can be known to be wrong before data is read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": (-1, 1, 1)}, r"data\.num_train=-1 must be a non-negative integer"),
        ({"counts": (1, 1, "many")}, r"data\.num_test=many must be a non-negative integer"),
        ({"counts": (0, 0, 0)}, r"data\.num_train, data\.num_dev, data\.num_test are all 0"),
        ({"template": "{"}, r"data\.template='\{'"),
        ({"completion_template": "{}"}, r"data\.completion_template='\{\}': a field has no name"),
        (
            {"split": "train[:"},
            r"data\.split='train\[:' must be the name of a split or a slice.*train\[:500\]",
        ),
        ({"split": "train[:200%]"}, "must be the name of a split"),
        ({"path": ""}, r"data\.path='' is a folder, but no data set"),
        (
            {"path": "nothing.jsonl"},
            r"data\.path='nothing\.jsonl' is not there \(/.*/nothing\.jsonl\); give a JSON",
        ),
        (
            {"path": str(Path(__file__).parent)},
            "is a folder, but no data set that save_to_disk wrote",
        ),
        (
            {"path": __file__},
            r"ends in \.py, but only \.json, \.jsonl, \.csv, \.parquet, \.txt are read",
        ),
    ],
)
def test_wrong_settings_are_found_before_data_is_read(changes, message):
    with pytest.raises(UserError, match=message):
        source(**{"path": "someone/set"} | changes)


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
    assert {p.text: p.split for p in unique(iter(prompts_of(REPEATED)))} == {
        "a": "train",
        "b": "train",
        "c": "dev",
        "d": "test",
    }
    assert len(unique(prompts_of(REPEATED))) == 4


def test_a_split_that_is_lost_to_others_or_to_limits_is_named_before_data_is_made(tmp_path):
    with pytest.raises(UserError, match="all dev prompts are prompts of an earlier split, too"):
        unique(prompts_of([("a", "train"), ("b", "train"), ("b", "dev"), ("a", "dev")]))
    prompts = prompts_of([("abc", "train"), ("abcabc", "dev")])
    with pytest.raises(UserError, match=r"no dev prompt is left.* raise data\.max_prompt_tokens=5"):
        generate_data(tiny_pair(), prompts, DataGeneration(max_prompt_tokens=5), tmp_path)


SOURCE = '''
import os

class Shape:
    def area(self, scale=1):
        """Return the area.

        More words that a prompt leaves out.
        """
        # in square units
        return self.width * self.height * scale

    def todo(self):
        """Not there yet."""
        raise NotImplementedError

def undocumented(x):
    return x

def one_line(): """Doc."""; return 1

@property
def quoted(x):
    \'\'\'Say "hello" to """x""".\'\'\'
    if x:
        return """
        text"""
    return None
'''


def test_a_function_becomes_signature_docstring_and_body():
    second, first = prompt_sources._functions_in(SOURCE, "shape.py")
    assert first.prompt == 'def area(self, scale=1):\n    """Return the area."""\n'
    assert first.body == "    # in square units\n    return self.width * self.height * scale\n"
    assert second.prompt.startswith("def quoted(x):\n")
    for each in (first, second):
        ast.parse(each.prompt + each.body)
        assert each.source == "shape.py"
    assert list(prompt_sources._functions_in("def broken(:\n", "x.py")) == []


def test_files_decide_the_split_and_it_is_the_same_everywhere():
    names = [f"package{i}/module.py" for i in range(4000)]
    shares = {
        split: sum(prompt_sources.split_of(name) == split for name in names) / 4000
        for split in ("train", "dev", "test")
    }
    # Five standard errors.
    assert abs(shares["dev"] - 0.5) < 0.04 and abs(shares["test"] - 0.25) < 0.04
    assert [
        prompt_sources.split_of(name) for name in ("json/decoder.py", "heapq.py", "textwrap.py")
    ] == ["dev", "dev", "train"]


# --- conversations

SYSTEM, U1, A1, U2, A2 = (
    {"role": role, "content": text}
    for role, text in (
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "Hello."),
        ("user", "why"),
        ("assistant", "Because."),
    )
)
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": 2, "name": "add"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def chats(tmp_path, rows, answered=False, **keys):
    """Return (text or messages, tools, response) of each prompt."""
    path = jsonl(tmp_path, rows)
    keys = {
        "template": ["{messages}", "{conversations}"][: 1 + ("conversations" in json.dumps(rows))]
    } | keys
    prompts = replace(source(path, counts=(99, 0, 0)), **keys).load(chats=True, responses=answered)
    contents = [
        json.loads(prompt.text) if prompt.is_chat else {"messages": prompt.text}
        for prompt in prompts
    ]
    return [
        (each["messages"], each.get("tools"), p.response)
        for p, each in zip(prompts, contents, strict=True)
    ]


def shared(messages):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {
        "conversations": [
            {"from": names[each["role"]], "value": each["content"], "weight": 1}
            for each in messages
        ]
    }


@pytest.mark.parametrize(
    "form", [lambda m: {"messages": m}, shared, lambda m: {"messages": json.dumps(m)}]
)
@pytest.mark.parametrize(
    ("messages", "prompts"),
    [
        ([U1, A1, U2, A2], [("hi", "Hello."), ([U1, A1, U2], "Because.")]),
        ([U1, A1, U2], [("hi", "Hello."), ([U1, A1, U2], None)]),
        ([SYSTEM, U1, A1], [([SYSTEM, U1], "Hello.")]),
        ([A1, U1, A2], [([A1, U1], "Because.")]),
        ([U1, U2, A1], [([U1, U2], "Hello.")]),
        ([U1, A1, A2], [("hi", "Hello.")]),
        ([U1], [("hi", None)]),
    ],
)
def test_the_history_of_each_turn_is_kept(tmp_path, form, messages, prompts):
    left_out = [[], [SYSTEM], [A1], [{**U1, "content": None}, A1]]
    rows = [form(messages), *map(form, left_out)]
    for turns, those in (("all", prompts), ("last", prompts[-1:])):
        expected = [(text, None, response) for text, response in those]
        assert chats(tmp_path, rows, turns=turns) == [(text, None, None) for text, _, _ in expected]
        if any(response for *_, response in expected):
            assert chats(tmp_path, rows, answered=True, turns=turns) == expected
        else:
            with pytest.raises(UserError, match="the data set's own responses are asked for"):
                chats(tmp_path, rows, answered=True, turns=turns)


def test_tools_and_the_system_prompt_of_a_row_are_the_conversations(tmp_path):
    rows = [
        {"messages": [U1, CALL, RESULT, A1], "tools": TOOLS},
        {"messages": [U1], "tools": json.dumps(TOOLS), "system": "Be brief."},
        {"messages": [SYSTEM, U1], "tools": "", "system": "Be long."},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
                }
            ]
        },
    ]
    called = [U1, CALL | {"content": ""}, RESULT | {"content": "2"}]
    expected = [
        ([U1], TOOLS, ""),
        (called, TOOLS, "Hello."),
        ([SYSTEM, U1], TOOLS, None),
        ([SYSTEM, U1], None, None),
    ]
    assert chats(tmp_path, rows, answered=True, turns="all") == [*expected, ("hi", None, None)]
    # Parquet files have null for the keys that only other messages have.
    rows[0]["messages"][2] = called[2]
    Dataset.from_list(rows[:1]).to_parquet(tmp_path / "rows.parquet")
    loaded = source(str(tmp_path / "rows.parquet"), "{messages}", (1, 0, 0)).load(chats=True)
    assert json.loads(loaded[0].text) == {"messages": called, "tools": TOOLS}


def test_a_single_message_of_another_role_is_no_plain_instruction(tmp_path):
    other = {"role": "tool", "content": "4"}
    assert chats(tmp_path, [{"messages": [other]}]) == [([other], None, None)]


@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
@pytest.mark.parametrize(
    ("asks", "answers"),
    [("Human", "GPT"), ("User", "model"), ("USER", "Assistant"), (" user", "ai")],
)
def test_roles_have_one_meaning_under_each_key_and_in_each_case(tmp_path, keys, asks, answers):
    key, content = keys
    messages = [
        {key: asks if each["role"] == "user" else answers, content: each["content"]}
        for each in (U1, A1, U2, A2)
    ]
    found = chats(tmp_path, [{"messages": messages}], answered=True, turns="all")
    assert found == [("hi", None, "Hello."), ([U1, A1, U2], None, "Because.")]


@pytest.mark.parametrize("key", ["role", "from"])
def test_a_role_that_is_not_known_is_named_with_its_line(tmp_path, key):
    rows = [{"messages": [U1]}, {"messages": [{key: "narrator", "content": "x", "value": "x"}]}]
    with pytest.raises(UserError, match=rf"line 2: .*'messages\[0\]' is {key}='narrator'.*human, "):
        chats(tmp_path, rows)


@pytest.mark.parametrize(
    ("template", "bos", "rendered"),
    [
        (
            "{{ bos_token }}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n",
            "<bos>",
            "<start_of_turn>user\nhi<end_of_turn>\n",
        ),
        (
            "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n{{ m.content }}",
            None,
            "<|im_start|>user\nhi",
        ),
        ("{{ bos_token }}[INST] {{ m.content }} [/INST]", "<s>", "<s>[INST] hi [/INST]"),
        # by the format of another model
        ("{{ bos_token }}[INST] {{ m.content }} [/INST]", "<s>", "<|im_start|>user\nhi"),
        (
            "<|im_start|>user\n{{ m.content }}<|im_end|>",
            None,
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
        ),
    ],
)
def test_a_prompt_that_is_rendered_already_is_named_once(nano, template, bos, rendered, caplog):
    tokenizer = copy.deepcopy(nano.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    tokenizer.bos_token = bos
    pair = replace(nano, tokenizer=tokenizer)
    texts = ["plain", rendered, rendered + "!"]
    prompts = [
        Prompt(str(line), "test", text, place=f"line {line}") for line, text in enumerate(texts, 1)
    ]
    encode_prompts(pair, prompts[:1], ResponseLimits())
    assert not caplog.records
    encode_prompts(pair, prompts, ResponseLimits())
    (record,) = caplog.records
    assert "2 of 3 prompts, the first in line 2, hold " in record.getMessage()
    assert "model.chat=false" in record.getMessage()
    caplog.clear()
    encode_prompts(replace(pair, chat=False), prompts, ResponseLimits())
    assert not caplog.records


def test_the_turns_of_a_conversation_are_in_one_split(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = [
        {
            "messages": [
                {"role": ("user", "assistant")[turn % 2], "content": f"{row} {turn}"}
                for turn in range(8)
            ]
        }
        for row in range(9)
    ]
    for shuffled in (False, True):
        made = replace(
            source(jsonl(tmp_path, rows), "{messages}", (14, 14, 8)), turns="all", shuffled=shuffled
        ).load(chats=True)
        splits = defaultdict(set)
        for prompt in made:
            splits[prompt.group].add(prompt.split)
        assert (
            caplog.messages[-1]
            == f"data: {36 - len(made)} prompts left out, whose conversations began in an earlier"
            " split"
        )
        assert [len(each) for each in splits.values()] == [1] * 9 and {
            s for each in splits.values() for s in each
        } == set(SPLITS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [U1, {"role": "user", "content": {"a": 1}}]},
            r"the field 'messages\[1\]\[content\]' is an object; .*: convert it",
        ),
        ({"messages": [{"role": "user", "content": True}]}, r"\[content\]' is true or false"),
        (
            {"messages": [U1, "why"]},
            (
                r"'messages\[1\]' is a text, no message; expected role and content, or from and"
                r" value, with a role of human, "
            ),
        ),
        (
            {"messages": [{"from": "function_call", "value": "x"}]},
            r"'messages\[0\]' is from='function_call', no message",
        ),
        (
            {"messages": "[{'role': 'user', 'content': 'x'}]"},
            r"'messages' is a text that is no JSON .*as JSON",
        ),
        (
            {"messages": [U1, CALL | {"tool_calls": [float("nan")]}, RESULT]},
            "the messages cannot be written as JSON",
        ),
        ({"messages": [U1], "tools": "add"}, "the field 'tools' is a text that is no JSON"),
    ],
)
def test_a_message_that_is_no_text_is_refused_with_its_row_and_field(tmp_path, row, message):
    with pytest.raises(UserError, match=rf"rows\.jsonl', line 2: .*{message}"):
        chats(tmp_path, [{"messages": [SYSTEM, U1, A1, U2]}, row])


@pytest.fixture
def chatting(nano):
    """Nano with a chat template as that of Gemma: no system role, and roles alternate."""
    tokenizer = copy.deepcopy(nano.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not"
        " supported') }}{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{"
        " raise_exception('Roles must alternate') }}{% endif %}{{ m.role + ': ' + m.content + '\n'"
        " }}{% endfor %}{{ tools | length if tools }}"
    )
    return replace(nano, tokenizer=tokenizer)


def test_what_the_chat_template_refuses_is_told_once_with_the_row(chatting, nano, tmp_path, caplog):
    rows = [{"messages": messages} for messages in ([U1, A1, U2], [SYSTEM, U1], [U1, U2], [U1])]
    made = source(jsonl(tmp_path, rows), "{messages}", (9, 0, 0)).load(chats=True)
    kept = encode_prompts(chatting, made, ResponseLimits())
    assert [chatting.decode(ids) for _, ids in kept] == [
        "user: hi\nassistant: Hello.\nuser: why\n",
        "user: hi\n",
    ]
    expected = (
        "data: 2 of 4 prompts left out, the first in line 2: the chat template of"
        " embedded:nano/target refuses the messages"
    )
    assert (
        caplog.messages[-1]
        == f"{expected} of system, user (System role not supported); give others."
    )
    with pytest.raises(
        UserError,
        match=(
            "none of 1 prompts has .* tokens; the first: line 3: the chat .* of user, user .Roles"
            " must a"
        ),
    ):
        encode_prompts(chatting, made[2:3], ResponseLimits())
    assert chatting.encode_chat([U1], TOOLS) != chatting.encode_chat([U1])
    for pair in (
        nano,
        replace(chatting, instruction_format="{instruction}"),
        replace(chatting, chat=False),
    ):
        with pytest.raises(
            UserError,
            match=r"reads no conversations .* 'data.template=\"\{messages\[0\]\[content\]\}\"'",
        ):
            pair.encode_chat([U1])
        assert [prompt.text for prompt, _ in encode_prompts(pair, made, ResponseLimits())] == ["hi"]
