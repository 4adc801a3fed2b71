"""The prompt sets of conf/data on rows with the columns of the hub's data sets, whose contents are
invented.
"""

import json
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest
from datasets import Dataset, DatasetDict

from specheads.commands.compose import command_config, source_of
from specheads.commands.help import read_head
from specheads.errors import UserError
from specheads.pair.config import config_folder
from specheads.prompts.data_set_source import DatasetSource

TASK = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request."
)
FUNCTION = 'def times_2(x):\n    """Return x times 2."""\n'
CONVERSATION = [
    {"role": ("user", "assistant")[number % 2], "content": text}
    for number, text in enumerate(("Name a tree.", "Oak.", "Another.", "Elm.", "One more.", "Fir."))
]
ROWS = {
    "alpaca": [
        {"instruction": "Name a colour.", "input": "", "output": "Blue.", "text": "unused"},
        {"instruction": "Count the vowels.", "input": "tea", "output": "Two.", "text": "unused"},
        {"instruction": "Add the numbers.", "input": "2, 3", "output": "5", "text": "unused"},
    ],
    "gsm8k": [
        {
            "question": f"Ada has {n} pears and eats 1. How many are left?",
            "answer": f"{n} - 1 = {n - 1}\n#### {n - 1}",
        }
        for n in (3, 5, 8)
    ],
    "humaneval": [
        {
            "task_id": f"Invented/{n}",
            "prompt": f'def times_{n}(x):\n    """Return x times {n}."""\n',
            "canonical_solution": f"    return x * {n}\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {n}\n",
            "entry_point": f"times_{n}",
        }
        for n in (2, 3, 4)
    ],
    "cnn-dailymail": [
        {
            "article": f"A bridge with {n} arches opened on Monday.",
            "highlights": f"Bridge of {n} arches opens.",
            "id": "a",
        }
        for n in (4, 5, 6)
    ],
    "xsum": [
        {
            "document": f"The town voted {n} to one for trams.\nThey start in May.",
            "summary": "A town gets trams.",
            "id": str(n),
        }
        for n in (7, 8, 9)
    ],
    "wmt14": [
        {"translation": {"de": "Der Zug kommt spät.", "en": "The train is late."}},
        {"translation": {"de": "Es regnet {heute}.", "en": "It is raining {today}."}},
        {"translation": {"de": "Die Tür ist offen.", "en": "The door is open."}},
    ],
    "mt-bench": (
        [
            {
                "prompt": [f"Plan a walk of {n} km.", "Shorten it."],
                "prompt_id": n,
                "category": "writing",
                "reference": [],
            }
            for n in (1, 2, 3)
        ]
        + [
            {
                "prompt": ["What is 2 + 3?", "And times 4?"],
                "prompt_id": 4,
                "category": "math",
                "reference": ["5", "20"],
            }
        ]
    ),
    "speed-bench": [
        {
            "question_id": f"{category}{n}",
            "category": category,
            "sub_category": None,
            "turns": [f"{category} {n}", "And?"],
        }
        | {"source": "invented", "src_id": str(n), "difficulty": None, "multiturn": True}
        for category in ("coding", "math", "qa")
        for n in range(2)
    ],
    "ultrachat": [
        {"prompt": "Name a tree.", "prompt_id": str(n), "messages": CONVERSATION[: 2 * n]}
        for n in (1, 2, 3)
    ],
    "spec-bench": [
        {"question_id": 1, "category": "writing", "turns": ["Describe a lamp.", "Now in rhyme."]},
        {
            "question_id": 2,
            "category": "translation",
            "turns": ["Translate German to English: Hallo"],
            "reference": ["Hello"],
        },
        {
            "question_id": 3,
            "category": "qa",
            "turns": ["who built the lamp"],
            "reference": ["Nobody"],
        },
        {
            "question_id": 4,
            "category": "rag",
            "turns": ["The lamp is 3 m tall.\nHow tall is the lamp?"],
            "reference": ["3 m"],
        },
    ],
}
# By name: the first row's prompt for a pair that takes instructions, for another one, and its
# response
FIRST = {
    "alpaca": ("Name a colour.", "Name a colour.", "Blue."),
    "gsm8k": (
        (
            f"{TASK}\n\n### Instruction:\nAda has 3 pears and eats 1. How many are left?\n\n###"
            " Response: Let's think step by step."
        ),
        "Question: Ada has 3 pears and eats 1. How many are left?\nAnswer:",
        "3 - 1 = 2\n#### 2",
    ),
    "humaneval": (
        (
            f"{TASK}\n\n\n### Instruction:\nCreate a Python script for this"
            f" problem:\n{FUNCTION}\n\n### Response:"
        ),
        FUNCTION,
        "    return x * 2\n",
    ),
    "cnn-dailymail": (
        "Summarize: A bridge with 4 arches opened on Monday.",
        (
            "###\nArticle: A bridge with 4 arches opened on Monday.\n\nSummarize the above article"
            " in 3 sentences.\n"
        ),
        "Bridge of 4 arches opens.",
    ),
    "xsum": (
        (
            "Article: The town voted 7 to one for trams.\nThey start in May.\n\nSummarize the above"
            " article in 1 sentence."
        ),
        (
            "###\nArticle: The town voted 7 to one for trams.\nThey start in May.\n\nSummarize the"
            " above article in 1 sentence.\n"
        ),
        "A town gets trams.",
    ),
    "wmt14": (
        "Translate German to English: Der Zug kommt spät.",
        (
            "Translate the following sentences from German to English.\n\nGerman: Der Zug kommt"
            " spät.\nEnglish:"
        ),
        "The train is late.",
    ),
    "speed-bench": ("coding 0", "coding 0", None),
    "ultrachat": ("Name a tree.", "Name a tree.", None),
    "mt-bench": ("Plan a walk of 1 km.", "Plan a walk of 1 km.", None),
    "spec-bench": ("Describe a lamp.", "Describe a lamp.", None),
}


def configured(name, *overrides):
    return source_of(command_config("data_gen", [f"data={name}", *overrides]))


@pytest.fixture(params=["jsonl", "json", "parquet"])
def file_of(request, tmp_path):
    """A function that writes the rows of a prompt set into a file of some kind and returns its
    path.
    """

    def write(name):
        path = tmp_path / f"{name}.{request.param}"
        if request.param == "parquet":
            Dataset.from_list(ROWS[name]).to_parquet(path)
        elif request.param == "json":
            path.write_text(json.dumps(ROWS[name]))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
        return path

    return write


def test_every_prompt_set_has_rows_here():
    known = {path.stem for path in (config_folder() / "data").glob("*.yaml")}
    assert set(ROWS) == set(FIRST) == known - {"nano", "smollm2"}  # which ship


@pytest.mark.parametrize("name", ROWS)
def test_the_head_of_a_prompt_set_says_what_it_is_and_its_licence_with_an_address(name):
    what, licence, *_ = read_head(
        (config_folder() / "data" / f"{name}.yaml").read_text()
    ).splitlines()
    # Docs/conf.py makes a table of them.
    assert what.endswith(".") and re.fullmatch(r"Licence: [^,]+, https://\S+", licence)


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_rows_become_prompts_in_the_format_of_their_set(file_of, name, chats):
    source = configured(name, f"data.path={file_of(name)}")
    prompts = source.load(chats, responses=source.response_template is not None)
    assert len(prompts) == len(ROWS[name])
    instruction, completion, response = FIRST[name]
    (first,) = [
        prompt for prompt in prompts if prompt.text == (instruction if chats else completion)
    ]
    assert first.response == response
    asked = {"train": source.num_train, "dev": source.num_dev, "test": source.num_test}
    assert {prompt.split for prompt in prompts} <= {
        split for split, count in asked.items() if count
    }


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("spec-bench", "humaneval")])
def test_the_hub_is_asked_for_the_splits_that_it_has(monkeypatch, name):
    asked = []

    def load_dataset(path, configuration, revision=None):
        asked.append((path, configuration, revision))
        rows = Dataset.from_list(ROWS[name][1:])
        test = Dataset.from_list(ROWS[name][:1])
        if name == "ultrachat":
            return DatasetDict(
                {"train_sft": rows, "test_sft": test, "train_gen": rows, "test_gen": test}
            )
        if name == "speed-bench":
            return DatasetDict({"test": rows})
        has_test = name not in ("alpaca", "mt-bench")
        return DatasetDict(
            {"train": rows, "validation": rows, "test": test} if has_test else {"train": rows}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = configured(name)
    prompts = source.load(chats=True)
    assert asked == [(source.path, source.name, source.revision)]
    if source.test_split:
        assert [prompt.split for prompt in prompts].count("test") == 1
    assert name == "xsum" or source.revision is None


def test_rows_that_are_sorted_by_task_are_shuffled_in_the_same_way_each_time(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"turns": [f"{task} {n}"]}) + "\n" for task in "abcd" for n in range(20))
    )
    source = configured("spec-bench", f"data.path={path}", "data.num_dev=16", "data.num_test=64")
    prompts = source.load(chats=True)
    dev = [prompt.text[0] for prompt in prompts if prompt.split == "dev"]
    assert len(dev) == 16 and set(dev) == set("abcd")
    assert len({prompt.text for prompt in prompts}) == 80 and prompts == source.load(chats=True)
    fewer = configured("spec-bench", f"data.path={path}", "data.num_dev=4", "data.num_test=0").load(
        chats=True
    )
    assert fewer == prompts[:4]
    in_order = configured(
        "spec-bench", f"data.path={path}", "data.num_dev=16", "data.shuffled=false"
    ).load(chats=True)
    assert {prompt.text[0] for prompt in in_order if prompt.split == "dev"} == {"a"}


def test_rows_of_a_domain_are_chosen_by_their_columns(file_of, tmp_path):
    file = f"data.path={file_of('speed-bench')}"
    prepared = tmp_path / "qualitative.jsonl"  # as the set's prepare.py writes it
    rows = [
        row | {"messages": [{"role": "user", "content": turn} for turn in row["turns"]]}
        for row in ROWS["speed-bench"]
    ]
    prepared.write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k != "turns"}) + "\n" for row in rows)
    )
    for where, domains in (("coding", ["coding"]), ("[qa, math]", ["math", "qa"])):
        for path in (file, f"data.path={prepared}"):
            prompts = configured(
                "speed-bench", path, f"data.where={{category: {where}, multiturn: true}}"
            ).load(chats=True)
            assert sorted(prompt.text for prompt in prompts) == [
                f"{domain} {n}" for domain in domains for n in range(2)
            ]
    message = (
        r"data.where=\{'category': 'maths'\} fits no row of .*, whose columns are question_id, "
    )
    with pytest.raises(UserError, match=message):
        configured("speed-bench", file, "data.where={category: maths}").load(chats=True)
    with pytest.raises(
        UserError,
        match="data.where=coding must be a set of keys; it is which rows are taken, by values",
    ):
        configured("speed-bench", file, "data.where=coding")


def test_a_row_that_refers_to_another_data_set_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    text = (
        "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nSummarize:"
        " {article}"
    )
    path.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in ("x", text)))
    with pytest.raises(
        UserError,
        match="line 2: it refers to a different data set in place of its text; give the file",
    ):
        configured("speed-bench", f"data.path={path}").load(chats=True)


@pytest.mark.parametrize(
    ("template", "value", "remedy"),
    [
        ("{a}", ["x"], r"is a list.*: join it into one text, or .*, such as \{a\[0\]\}"),
        ("{a}", {"de": "x"}, r"is an object.*or name a part of it, such as \{a\[de\]\}"),
        ("{a[0]}", [["x"]], r"the field 'a\[0\]' is a list.*such as \{a\[0\]\[0\]\}"),
        ("{a}", {}, "is an object.*: convert it"),
        ("{a[0]}", [True], "is true or false.*: convert it"),
    ],
)
def test_a_column_of_several_values_is_an_error_that_says_how_to_name_a_part(
    tmp_path, template, value, remedy
):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"a": value}) + "\n")
    with pytest.raises(UserError, match=remedy):
        DatasetSource(str(path), None, "train", None, template, None, 1, 0, 0).load(chats=True)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a server of `tmp_path`, from which `datasets` may download into a new
    cache.
    """

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            pass

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "cache")
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_a_file_is_read_from_its_address(server, file_of):
    address = f"{server}/{file_of('spec-bench').name}"
    source = configured("spec-bench", f"data.path={address}")
    assert {prompt.text for prompt in source.load(chats=True)} == {
        row["turns"][0] for row in ROWS["spec-bench"]
    }
