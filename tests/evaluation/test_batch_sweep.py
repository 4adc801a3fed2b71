"""Batches decoded side by side: the tokens are those of the decoder, and a journal keeps what is
done.
"""

import pytest
from fakes import tiny_pair

from specheads import SpeculativeDecoder, Warp
from specheads.evaluation.batches import run_batches
from specheads.evaluation.candidates import TARGET_ALONE, fixed_length
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import Sweep, response_seed
from specheads.storage.journal import Journal

PROMPTS = [[1, 2, 3], [4], [5, 6, 0]]
FIXED = fixed_length(2)
SETTINGS = [TARGET_ALONE, FIXED, fixed_length(3)]


def run(*kept, repeats=2):
    sweep = Sweep(
        tiny_pair(7, scale=2.0),
        Evaluation(warp=Warp(), max_new_tokens=12, repeats=repeats, engine="eager"),
        32,
    )
    return run_batches(sweep, SETTINGS, [*PROMPTS, PROMPTS[0]], 2, *kept)


def counts(runs):
    names = ("num_tokens", "num_drafted", "num_accepted", "num_target_calls")
    return [
        [[getattr(part, name) for name in names] for part in run.stats]
        for made in runs
        for run in made
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run(Journal(tmp_path_factory.mktemp("runs") / "batches.jsonl", {}))


def test_the_counts_are_those_of_the_decoder(runs):
    assert [len(made) for made in runs] == [2, 2, 2]
    requests = [*PROMPTS, PROMPTS[0]]
    decoder = SpeculativeDecoder(
        tiny_pair(7, scale=2.0), stopping=FIXED.rule, engine="eager", window=32
    )
    for repeat, run in enumerate(runs[1]):
        seeds = [response_seed(0, number, repeat) for number in range(4)]
        expected = decoder.generate_batch(requests, max_batch=2, max_new_tokens=12, seeds=seeds)
        assert [part.num_accepted for part in run.stats] == [
            expected[number].stats.num_accepted for number in range(4)
        ]
        assert [[n for n, _ in rounds] for rounds in run.rounds] == [
            [len(made.tokens) for made in expected[number].rounds] for number in range(4)
        ]
    assert {part.num_tokens for made in runs for run in made for part in run.stats} == {12}
    alone, fewer, more = (sum(part.num_drafted for part in made[0].stats) for made in runs)
    assert alone == 0 and more > fewer


def test_a_users_times_add_up(runs):
    for run in (run for made in runs for run in made):
        decoding = sum(part.decode_seconds for part in run.stats)
        assert run.token_seconds.sum() == pytest.approx(decoding) and len(run.token_seconds) == sum(
            part.num_tokens for part in run.stats
        )
        assert (
            min(run.first_token_seconds) > 0
            and max(part.seconds for part in run.stats) <= run.seconds
        )
        assert run.tokens_per_second == 48 / run.seconds


def test_what_a_journal_holds_is_not_decoded_again(runs, tmp_path):
    path = tmp_path / "batches.jsonl"
    progress = []
    first = run(Journal(path, {}), progress.append)
    assert counts(first) == counts(runs) and sum(progress) == 2 * 3 * 4
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))  # killed after two of six runs
    again = run(Journal(path, {}))
    assert (again[0][0], again[1][0]) == (first[0][0], first[1][0]) and counts(again) == counts(
        first
    )
    progress.clear()
    done = run(Journal(path, {}), progress.append)
    assert done == again and progress == [24]
