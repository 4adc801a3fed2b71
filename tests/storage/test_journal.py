import json

import pytest

from specheads import Warp
from specheads.decoding.stopping import FixedLength
from specheads.evaluation.candidate import RuleChoice
from specheads.evaluation.candidates import candidates
from specheads.evaluation.sweep import run_sweep, sweep_settings
from specheads.storage.journal import Journal

PROVENANCE = {"settings": [("a", None)], "seed": 0}


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "generations.jsonl", PROVENANCE)
    for prompt in range(3):
        journal.add(prompt, {"stats": [prompt]})
    return journal.path


def test_a_journal_is_read_back(path):
    assert Journal(path, PROVENANCE).entries == {n: {"stats": [n]} for n in range(3)}


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_was_cut_off_is_dropped_and_the_journal_goes_on(path, cut):
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(path, PROVENANCE)
    whole = 2 if cut > 1 else 3  # without its line end a line is still whole
    assert sorted(journal.entries) == list(range(whole))
    journal.add(7, {})
    assert sorted(Journal(path, PROVENANCE).entries) == [*range(whole), 7]


@pytest.mark.parametrize("damage", [b"", b"nonsense\n", b"[1]\n"])
def test_a_journal_of_nothing_starts_anew(path, damage):
    path.write_bytes(damage)
    assert Journal(path, PROVENANCE).entries == {}
    assert json.loads(path.read_text()) == {"provenance": {"settings": [["a", None]], "seed": 0}}


def test_a_journal_of_another_sweep_is_kept_under_another_name(path, caplog):
    content = path.read_text()
    provenance = {**PROVENANCE, "seed": 1}
    assert Journal(path, provenance).entries == {}
    assert json.loads(path.read_text())["provenance"]["seed"] == 1
    assert path.with_name("generations-1.jsonl").read_text() == content
    assert "another seed; it is kept as generations-1.jsonl" in caplog.text


def test_a_sweep_that_is_interrupted_goes_on_to_the_same_counts(nano, prompts, tmp_path):
    def sweep(journal=None, stop_after=None):
        done = []

        def count(number):
            done.append(number)
            if stop_after is not None and sum(done) >= stop_after:
                raise InterruptedError

        rules = {"fixed_length": RuleChoice(FixedLength, {"num_tokens": [1, 3]})}
        settings = sweep_settings(candidates(rules, {}, None))
        measured = run_sweep(nano, settings, prompts[:4], Warp(), 6, 2, 0, on_generation=count, journal=journal)
        counts = [[(s.num_tokens, s.num_drafted, s.num_accepted, s.num_target_calls) for s in m.stats] for m in measured]
        return counts, [len(m.token_seconds) for m in measured], done

    counts, lengths, _ = sweep()
    with pytest.raises(InterruptedError):
        sweep(Journal(tmp_path / "j", PROVENANCE), stop_after=15)  # six responses per prompt: in the third one
    journal = Journal(tmp_path / "j", PROVENANCE)
    assert sorted(journal.entries) == [0, 1]
    again = sweep(journal)
    assert again[:2] == (counts, lengths)
    assert again[2] == [12] + [1] * 12
