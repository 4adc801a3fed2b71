"""The order of the layers, and the words of the glossary; `python -m tests.structure --list` shows what is counted."""

import pytest

from tests.structure import (
    ROOT,
    State,
    circles,
    config_functions,
    config_modules,
    crossings,
    importers,
    main,
    replaced_words,
    upward_imports,
)

CODE = State(ROOT)


def test_imports_go_down_only():
    assert upward_imports(CODE) == []


def test_no_modules_import_each_other():
    assert circles(CODE) == []


def test_specheads_below_the_door_does_not_import_data_gen():
    assert crossings(CODE)[0] == []


def test_only_its_verb_imports_the_papers_room():
    assert importers(CODE, "specheads.papers") == ["specheads.commands.papers"]


def test_only_the_door_knows_hydra_and_configs():
    assert config_modules(CODE) == []
    assert config_functions(CODE) == []


@pytest.mark.parametrize("place", ["identifiers", "config keys", "file names", "error messages", "help"])
def test_the_words_are_those_of_the_glossary(place):
    assert replaced_words(CODE)[place] == []


# --- what is counted


@pytest.fixture
def small(tmp_path):
    """A source tree with one mistake of each kind."""
    texts = {
        "specheads/__init__.py": "",
        "specheads/errors.py": "from specheads.heads import head\n",
        "specheads/heads/__init__.py": "",
        "specheads/heads/head.py": "def train(cfg):\n    from specheads import errors\n    raise ValueError('no: is no count')\n",
        "specheads/unheard_of.py": "import omegaconf\nimport data_gen.run\nLAWS = found = 1\n",
        "data_gen/run.py": "from . import label\n",
        "data_gen/label.py": "",
        "conf/train.yaml": "facts: 1   # of the draft's law\nown_key:\n  - twin: 2\n",
        "train.py": "import omegaconf\n\n\ndef main(cfg: 'DictConfig'):\n    ground_truth = HeadTruth = 1\n",
        "evaluate.py": "",
        "benchmarks/own.py": "",
        "tests/test_one.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return State(tmp_path)


def test_mistakes_of_structure_are_counted(small):
    assert upward_imports(small) == [
        "specheads.errors -> specheads.heads.head",
        "specheads.unheard_of has no layer",
    ]
    assert circles(small) == [["specheads.errors", "specheads.heads.head"]]
    assert crossings(small) == (["specheads.unheard_of -> data_gen.run"], [])
    assert small.edges["data_gen.run"] == {"data_gen.label"}
    assert config_modules(small) == ["specheads.unheard_of"]
    assert config_functions(small) == ["specheads.heads.head.train"]


def test_replaced_words_are_counted(small):
    assert replaced_words(small) == {
        "identifiers": ["LAWS", "found", "HeadTruth"],
        "identifiers of tests": [],
        "config keys": ["facts", "twin"],
        "file names": ["own"],
        "error messages": ["no: is no count"],
        "help": ["of the draft's law"],
    }


def test_the_table_has_a_row_for_every_count(capsys):
    main(["--no-times"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 17
    assert all(row[62:].strip()[0].isdigit() for row in rows)
