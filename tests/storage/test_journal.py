import json

import pytest

from specheads.storage.journal import Journal

PROVENANCE = {"settings": [("a", None)], "seed": 0}


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "generations.jsonl", PROVENANCE)
    for prompt in range(3):
        journal.add(prompt, {"stats": [prompt]})
    return journal.path


@pytest.mark.parametrize("damage", [b"", b"nonsense\n", b"[1]\n"])
def test_a_journal_without_a_header_starts_from_the_beginning(path, damage):
    path.write_bytes(damage)
    assert Journal(path, PROVENANCE).entries == {}
    assert json.loads(path.read_text()) == {"provenance": {"settings": [["a", None]], "seed": 0}}


def test_an_entry_that_was_changed_is_measured_again(path, caplog):
    path.write_text(path.read_text().replace('"stats": [1]', '"stats": [7]'))
    assert sorted(Journal(path, PROVENANCE).entries) == [0, 2]
    assert "1 lines of other settings, or damaged ones, are measured again" in caplog.text


def test_a_journal_of_another_sweep_starts_from_the_beginning(path, caplog):
    provenance = {**PROVENANCE, "seed": 1}
    assert Journal(path, provenance).entries == {}
    assert json.loads(path.read_text())["provenance"]["seed"] == 1
    assert "generations.jsonl: 3 lines of other settings, or damaged" in caplog.text
