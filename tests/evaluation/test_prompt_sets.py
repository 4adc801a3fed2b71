"""Which prompts an evaluation reads: none that a head learned from, and the final ones only where
they are asked for.
"""

import json
import logging
import platform

import pytest

from specheads import AcceptanceHead, HeadConfig, UserError
from specheads.commands import evaluate
from specheads.commands.compose import command_config
from specheads.commands.evaluate import evaluation_settings, named_test_sets, prompt_data
from specheads.commands.train import train_head
from specheads.evaluation.prompt_sets import PromptSet, PromptSets
from specheads.heads.head import LocatedHead, load_head
from specheads.heads.train_prompts import TrainPrompts, text_hash
from specheads.pair.config import config_folder
from specheads.prompts import sources
from specheads.prompts.prompt import Prompt

NUM_ROWS = 40
FILE = ["data=alpaca", "data.path=rows.jsonl", "data.template='{prompt}'"]
COUNTS = [
    "data.num_train=20",
    "data.num_dev=6",
    "data.num_test=14",
    "num_dev_prompts=4",
    "num_prompts=8",
    "num_live_prompts=3",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a file of 40 rows and one of its first 20."""
    rows = [json.dumps({"prompt": f"def f{number}(x):\n"}) + "\n" for number in range(NUM_ROWS)]
    for name, some in (
        ("rows.jsonl", rows),
        ("first.jsonl", rows[:20]),
        ("half.jsonl", rows[10:30]),
    ):
        (tmp_path / name).write_text("".join(some))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sets_of(pair, *overrides, **heads):
    cfg = command_config("evaluate", ["model=nano", *FILE, *COUNTS, *overrides, "paths.run=run"])
    located = {}
    for name, train_prompts in heads.items():
        head = AcceptanceHead(HeadConfig(4, width=4))
        head.train_prompts = train_prompts
        located[name] = LocatedHead(head, name)
    return PromptSets(prompt_data(cfg), pair, located, evaluation_settings(cfg))


def texts_of(rows):
    """Prompts of some rows of the file."""
    return [f"def f{number}(x):\n" for number in rows]


def rows_of(prompts):
    return [int(prompt.text[5 : prompt.text.index("(")]) for prompt, _ in prompts.prompts]


def test_without_heads_every_set_is_the_beginning_of_its_split(folder, nano):
    sets = sets_of(nano).recorded
    assert {name: rows_of(prompt_set) for name, prompt_set in sets.items()} == {
        "rows, dev": list(range(20, 24)),
        "rows": list(range(26, 34)),
    }
    assert [prompt_set.num_left_out for prompt_set in sets.values()] == [0, 0]


def test_train_prompts_of_a_head_are_left_out_and_others_take_their_place(folder, nano, caplog):
    learned = TrainPrompts.of(texts_of([21, 27, 30]), texts_of([20, 28]))
    with caplog.at_level(logging.INFO):
        sets = sets_of(nano, mine=learned)
        recorded = sets.recorded
    # What it was calibrated on is a dev prompt as any other
    assert rows_of(recorded["rows, dev"]) == [20, 22, 23, 24]
    assert rows_of(recorded["rows"]) == [26, 29, 31, 32, 33, 34, 35, 36]
    assert rows_of(sets.decoded) == [26, 29, 31]
    assert (
        "3 prompts of 14 of rows were left out" in caplog.text
        and "1 prompt of 6 of rows, dev was left out" in caplog.text
    )
    assert [prompt_set["num_left_out"] for prompt_set in sets.context()["prompts"].values()] == [
        1,
        3,
        3,
    ]
    assert [note for note in sets.notes() if note.startswith("3 prompts of rows were left out")]


def test_a_head_of_another_template_knows_its_rows(folder, nano):
    """Templates that differ in white space and case give the same rows other ids."""
    learned = TrainPrompts.of(
        [text.replace(" ", "\n\n").upper() for text in texts_of([21, 26, 30])]
    )
    recorded = sets_of(nano, mine=learned).recorded
    assert rows_of(recorded["rows, dev"]) == [20, 22, 23, 24] and rows_of(recorded["rows"])[:4] == [
        27,
        28,
        29,
        31,
    ]


def test_train_prompts_of_every_head_are_left_out(folder, nano):
    sets = sets_of(
        nano,
        one=TrainPrompts.of(texts_of([26])),
        other=TrainPrompts.of(texts_of([28]), texts_of([29])),
    )
    assert rows_of(sets.recorded["rows"])[:3] == [27, 30, 31]


def test_a_file_yields_rows_that_no_head_learned_from(folder, nano):
    """As many as are asked for, though the file begins with those.

    The rows that rules are tuned on are left out, too.
    """
    learned = TrainPrompts.of(texts_of(range(20)), texts_of([20, 21]))
    sets = sets_of(nano, "test_sets={humaneval: rows.jsonl}", mine=learned)
    more = sets.recorded["humaneval"]
    assert rows_of(more) == list(range(24, 32)) and more.num_left_out == 24
    assert "24 prompts of humaneval were left out" in " ".join(sets.notes())


@pytest.mark.parametrize(
    ("words", "rows", "message"),
    [
        (
            ["test_sets={humaneval: first.jsonl}"],
            20,
            r"humaneval cannot be reported on: all 20 .*head=mine.*test_sets=\{humaneval: <file>\}",
        ),
        (
            [],
            NUM_ROWS,
            r"rows cannot be reported on: all 14 of its prompts .*head=mine.*data\.num_test",
        ),
    ],
)
def test_train_prompts_only_are_refused(folder, nano, words, rows, message):
    sets = sets_of(nano, "num_dev_prompts=1", *words, mine=TrainPrompts.of(texts_of(range(rows))))
    with pytest.raises(UserError, match=message):
        _ = sets.reported, sets.recorded


def test_a_name_without_a_file_yields_the_test_prompts_of_its_split(folder, nano, tmp_path):
    """The first rows of the set are those that a head of it is trained on."""
    shared = config_folder() / "data" / "humaneval.yaml"
    text = shared.read_text().replace("openai/openai_humaneval", str(tmp_path / "rows.jsonl"))
    for key, count in (("num_train", 84), ("num_dev", 20), ("num_test", 60)):
        assert f"{key}: {count}" in text
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "humaneval.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specheads.commands.compose.config_folder", lambda: tmp_path)
        more_sets = named_test_sets({"humaneval": None}, 100)
    sets = sets_of(nano, "num_prompts=100")
    sets.settings = sets.settings.but(test_sets=more_sets)
    more = sets.recorded["humaneval"]
    assert rows_of(more) == list(range(25, 40))  # 84, 20 and 60 of 164 rows are 20, 5 and 15 of 40


def test_a_set_that_reads_no_file_refuses_a_file(folder, nano):
    with pytest.raises(
        UserError,
        match=r"test_sets=\{nano: rows\.jsonl\}: nano reads no file; write null",
    ):
        sets_of(nano, "test_sets={nano: rows.jsonl}")


def test_a_head_that_does_not_name_its_prompts_is_named(folder, nano, caplog):
    sets = sets_of(nano, old=None)
    assert "Head old does not name the prompts that it learned from" in caplog.text
    assert rows_of(sets.recorded["rows"])[0] == 26 and sets.notes() == [caplog.records[-1].message]


def test_provenance_is_a_hash_of_ids_in_any_order():
    prompts = [(Prompt(f"{number:016x}", "test", str(number)), [1]) for number in range(5)]
    whole, reversed_, part = (
        PromptSet("a", "test", some).provenance() for some in (prompts, prompts[::-1], prompts[1:])
    )
    assert whole == reversed_ and whole["sha256"] != part["sha256"] and part["num_prompts"] == 4


@pytest.fixture
def nano_sets(nano, monkeypatch):
    """A function that gives the sets of data=nano, from a made-up library in which each file has
    several functions.
    """
    functions = [
        sources.Function(f"def f{number}(x):\n", "    return 1\n", f"file{number % 60}.py")
        for number in range(1200)
    ]
    monkeypatch.setattr(
        sources,
        "standard_library",
        lambda side: [
            function for function in functions if sources.split_of(function.source) == side
        ],
    )

    def make(*words):
        cfg = command_config("evaluate", ["model=nano", "head=null", "paths.run=run", *words])
        return PromptSets(prompt_data(cfg), nano, {}, evaluation_settings(cfg))

    return make


def test_prompts_of_the_library_have_its_python_and_their_files(nano_sets):
    sets = nano_sets("data.num_test=20", "num_prompts=10")
    recorded = sets.recorded
    assert [each["python"] for each in sets.context()["prompts"].values()] == [
        platform.python_version()
    ] * 2
    of_file = {
        function.prompt: function.source
        for side in ("dev", "test")
        for function in sources.standard_library(side)
    }
    for prompt_set in recorded.values():
        assert prompt_set.groups == [of_file[prompt.text] for prompt, _ in prompt_set.prompts]


def test_a_trained_head_is_evaluated_on_rows_that_it_never_saw(folder, nano, capsys):
    """Training names its prompts, calibration adds those that it read, and an evaluation on their
    file leaves both out.
    """
    nano_here = ["model=nano", "model.dtype=float32", "model.device=cpu"]
    small = [*nano_here, *FILE, *COUNTS[:3], "data.max_new_tokens=8"]
    head = [
        "heads=lookahead",
        "trainer.max_epochs=1",
        "trainer.accelerator=cpu",
        "head.depth=0",
        "head.width=8",
        "calibration=2",
    ]
    exported = train_head(
        command_config("train", [*small, *head, "paths.run=trained"]), nano
    ).folder
    rules = [
        "stopping=[fixed_length,head_threshold]",
        "fixed_lengths=[1,2]",
        "thresholds=[0.5]",
        "live=none",
        "ratios=[10]",
    ]
    words = [
        f"head={exported}",
        *COUNTS[3:],
        *rules,
        "test_sets={humaneval: rows.jsonl}",
        "paths.run=run",
    ]
    cfg = command_config("evaluate", [*small, *words])
    learned = load_head(exported).train_prompts
    assert learned.train.tolist() == sorted(map(text_hash, texts_of(range(20))))
    assert learned.dev.tolist() == sorted(map(text_hash, texts_of([20, 21])))
    report = evaluate.evaluate_rules(cfg)
    # 20 and 2, and two more that rules are tuned on
    assert report.context["prompts"]["humaneval"]["num_left_out"] == 24
    assert [data.num_prompts for data in report.data_sets] == [4, 8, 8]
    assert (
        "24 prompts of humaneval were left out" in " ".join(report.notes)
        and "24 prompts of humaneval" in capsys.readouterr().out
    )


# --- the final split


def test_final_prompts_are_reported_on_request(folder, nano):
    sets = sets_of(nano, "data.num_test=6", "data.num_final=8", "split=final")
    recorded = sets.recorded
    assert list(recorded) == ["rows, dev", "rows, final"] and recorded["rows, final"].role == "test"
    assert rows_of(recorded["rows, final"]) == list(range(32, 40))
    assert rows_of(sets.decoded) == [32, 33, 34]
    context = sets.context()
    assert (context["split"], context["final_parts"]) == ("final", [])
    assert list(context["prompts"]) == ["rows, dev", "rows, final", "rows, final, decoded"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["split=dev"], "split=dev must be one of 'test' or 'final'"),
        (["split=final"], r"split=final needs final prompts.*data\.num_final=500"),
    ],
)
def test_other_splits_are_refused(folder, nano, words, message):
    def check(*overrides):
        sets = sets_of(nano, *overrides)
        sets.data.check(sets.settings.split)

    with pytest.raises(UserError, match=message):
        check(*words)
    check("split=final", "data.num_final=3")
