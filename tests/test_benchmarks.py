"""Every table of the documentation is rendered from results, and every result says how to reproduce
it.
"""

import json
import re
import shutil

import pytest

from benchmarks import results as benchmark_results
from benchmarks.render import BLOCK, DOCUMENTS, RESULTS, ROOT, main, source, update
from benchmarks.results import Column, Table, text_of, write_result

FILES = sorted(RESULTS.glob("*.json"))
CONTENTS = {path.stem: json.loads(path.read_text()) for path in FILES}


def blocks(document):
    """Return result and table of every block."""
    return [(block[2], block[3]) for block in BLOCK.finditer((ROOT / document).read_text())]


def test_tables_agree_with_their_results(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", CONTENTS)
def test_results_say_how_they_were_made(name):
    content = CONTENTS[name]
    assert content["name"] == name and content["command"] and content["commit"]
    assert content["machine"]["cpu"] and re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    keys = [table["key"] for table in content["tables"]]
    assert keys and len(keys) == len(set(keys))
    for table in content["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_every_result_is_shown_and_every_block_has_a_result():
    shown = [block for document in DOCUMENTS for block in blocks(document)]
    assert len(shown) == len(set(shown))
    known = {
        (name, table["key"]) for name, content in CONTENTS.items() for table in content["tables"]
    }
    assert set(shown) <= known
    assert {name for name, _ in shown} == CONTENTS.keys()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_table_is_typed_by_hand(document):
    text = BLOCK.sub("", (ROOT / document).read_text())
    assert "<!-- table:" not in text and "<!-- end -->" not in text
    assert not [
        line for line in text.splitlines() if line.startswith("|") and re.search(r"\d", line)
    ]


def test_a_changed_number_is_found(tmp_path):
    """The check names the table of a number that is changed by hand."""
    for document in DOCUMENTS:
        (tmp_path / document).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / document, tmp_path / document)
    assert update(tmp_path, check=True) == []
    document = tmp_path / "CONTRIBUTING.md"
    document.write_text(document.read_text().replace("| replay.replay | ", "| replay.replay | 1"))
    assert update(tmp_path, check=True) == ["CONTRIBUTING.md: mutants/modules"]


def test_written_results_are_rendered(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_results, "OUTPUTS", tmp_path)
    columns = [Column("rule"), Column("speed", "ratio:1"), Column("overlap", "percent:1")]
    rows = [["a|b", 1.25, {"value": 0.5, "low": 0.4, "high": 0.6}]]
    table = Table("up", "Up", columns, rows)
    path = write_result("made", [table], notes=["One."], seeds=[0, 1])
    content = json.loads(path.read_text())
    assert content["notes"] == ["One."] and content["seeds"] == [0, 1]
    assert text_of(table) == (
        "| rule | speed | overlap |\n|---|---:|---:|\n| a\\|b | 1.2x | 50.0 % [40.0, 60.0] |"
    )
    assert source(content).startswith(f"<sub>`{content['command']}`; {content['date']}; ")
    assert source(content).endswith(". One.</sub>")
