import json

import pytest

from specheads import Warp
from specheads.decoding.stopping import FixedLength
from specheads.evaluation.candidates import RuleChoice, candidates
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import Sweep, sweep_settings
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
    assert "1 incomplete or damaged lines are measured again" in caplog.text


def test_a_journal_of_another_sweep_starts_from_the_beginning(path, caplog):
    provenance = {**PROVENANCE, "seed": 1}
    assert Journal(path, provenance).entries == {}
    assert json.loads(path.read_text())["provenance"]["seed"] == 1
    assert (
        "generations.jsonl starts from the beginning: it was measured with another seed"
        in caplog.text
    )


def test_an_interrupted_sweep_resumes_to_the_same_counts(nano, prompts, tmp_path):
    def sweep(journal=None, stop_after=None):
        done = []

        def count(number):
            done.append(number)
            if stop_after is not None and sum(done) >= stop_after:
                raise InterruptedError

        rules = {"fixed_length": RuleChoice(FixedLength, {"num_tokens": [1, 3]})}
        settings = sweep_settings(candidates(rules, {}, None))
        how = Evaluation(warp=Warp(), max_new_tokens=6, repeats=2, engine="eager")
        measured = Sweep(nano, how, nano.window).run(settings, prompts[:4], journal, count)
        counts = [
            [(s.num_tokens, s.num_drafted, s.num_accepted, s.num_target_calls) for s in m.stats]
            for m in measured
        ]
        return counts, [len(m.token_seconds) for m in measured], done

    counts, lengths, _ = sweep()
    with pytest.raises(InterruptedError):
        # Six responses per prompt: in the third one.
        sweep(Journal(tmp_path / "j", PROVENANCE), stop_after=15)
    journal = Journal(tmp_path / "j", PROVENANCE)
    assert sorted(journal.entries) == [0, 1]
    resumed = sweep(journal)
    assert resumed[:2] == (counts, lengths)
    assert resumed[2] == [12] + [1] * 12
