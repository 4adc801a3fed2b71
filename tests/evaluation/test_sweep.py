"""Sweeps of many settings on a small pair, and the doubts about their times."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import tiny_pair

from specheads import SpeculativeDecoder, Warp, stopping
from specheads.decoding.records import DecodeStats
from specheads.decoding.verification import BlockVerification
from specheads.evaluation.candidates import (
    OF_VERIFICATION,
    TARGET_ALONE,
    Candidate,
    fixed_length,
)
from specheads.evaluation.evaluate import under_block
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import (
    DecodedRound,
    Measured,
    Sweep,
    disagreements_of,
    doubts_of,
    response_seed,
    sweep_settings,
)
from specheads.load import NOTABLE
from specheads.replay.intervals import NUM_RESAMPLES
from specheads.storage.journal import Journal

SHORT = fixed_length(1)
LONG = fixed_length(3)
PROMPTS = [[1, 2, 3], [4], [5, 6]]
HOW = Evaluation(warp=Warp(), max_new_tokens=12, repeats=2, seed=5, engine="eager")


def run(path=None, advance=lambda count: None, prompts=PROMPTS):
    journal = None if path is None else Journal(path, {})
    settings = [TARGET_ALONE, SHORT, LONG, *under_block([LONG])]
    return Sweep(tiny_pair(7, scale=2.0), HOW, 32).run(settings, prompts, journal, advance)


@pytest.fixture(scope="module")
def measured():
    return {each.setting.name: each for each in run()}


def test_a_setting_decodes_what_its_decoder_alone_does(measured):
    """Other settings share the memory, and all settings the seeds."""
    decoder = SpeculativeDecoder(
        tiny_pair(7, scale=2.0), stopping=LONG.live, warp=HOW.warp, engine="eager", window=32
    )
    for number, prompt in enumerate(PROMPTS):
        made = [
            decoder.generate(prompt, 12, seed=response_seed(5, number, repeat)).stats
            for repeat in range(2)
        ]
        stats = measured[LONG.name].stats[number]
        assert stats.num_accepted == sum(each.num_accepted for each in made)
        assert stats.num_target_calls == sum(each.num_target_calls for each in made)
    assert {each.setting.verification for each in measured.values()} != {None}


def test_counts_of_decoded_rounds_are_those_of_replayed_ones(measured):
    counts = measured[LONG.name].counts
    stats = measured[LONG.name].stats
    assert counts.tokens.tolist() == [each.num_tokens for each in stats]
    assert counts.accepted.tolist() == [each.num_accepted for each in stats]
    assert counts.target_calls.tolist() == [each.num_target_calls for each in stats]
    assert (counts.rounds @ np.arange(4)).tolist() == counts.drafted.tolist()


def test_the_seconds_of_rounds_are_those_of_decoding(measured):
    for each in measured.values():
        decoding = sum(part.decode_seconds for part in each.stats)
        assert each.token_seconds.sum() == pytest.approx(decoding, rel=0.05)
        assert len(each.token_seconds) == sum(part.num_tokens for part in each.stats)


def test_journalled_prompts_are_not_decoded_again(tmp_path):
    path = tmp_path / "sweep.jsonl"
    steps = []
    first = run(path, steps.append)
    assert sum(steps) == 4 * 3 * 2
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:9])  # killed while it wrote the last of three
    steps.clear()
    again = run(path, steps.append)
    done, *decoded = steps
    assert done == 2 * 4 * 2 and decoded == [1] * 8
    for before, after in zip(first, again, strict=True):
        assert before.rounds[:2] == after.rounds[:2]
        assert [part.num_accepted for part in before.stats] == [
            part.num_accepted for part in after.stats
        ]


def test_the_settings_of_a_sweep_are_those_that_can_decode():
    rule = stopping.MaxProbability(0.5, 4)
    bound = Candidate("ceiling", "bound", rule, None)
    assert sweep_settings([SHORT, bound, LONG]) == [TARGET_ALONE, SHORT, LONG]
    _, own = sweep_settings([], rule)
    assert (own.family, own.name, own.live) == (OF_VERIFICATION, "max prob", rule)


def test_the_same_rules_are_decoded_under_block_verification():
    alone, *drafting = sweep_settings([SHORT, LONG])
    made = under_block([alone, *drafting])
    assert [each.same_rule for each in made] == [SHORT.name, LONG.name]
    for each, plain in zip(made, drafting, strict=True):
        assert each.live is plain.live and isinstance(each.verification, BlockVerification)
        assert each.name == f"{plain.name} verification=block" and each.family == "block"


def test_seeds_differ_by_prompt_and_repeat():
    cases = (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)
    seeds = [response_seed(*each) for each in cases]
    assert len(set(seeds)) == 5 and seeds == [response_seed(*each) for each in cases]


def decoded(setting, seconds, cores=0.0):
    """Ten prompts with three rounds of a token each, of these seconds."""
    rounds = [DecodedRound(1, 0, 0, 0.0, each) for each in seconds]
    stats = DecodeStats(len(rounds), 0, 0, 0, len(rounds), 0, sum(seconds), 0.0)
    return Measured(setting, [stats] * 10, [rounds] * 10, [(cores, 1.0)] * 10)


BUSY = "The machine was busy: "
QUIETER = "; live figures need a quiet machine."
ALONE = decoded(TARGET_ALONE, (1, 1, 1), cores=NOTABLE)
DOUBTS = {
    "": (ALONE, 10),
    f"{BUSY}other processes took 1.5 of its cores while it decoded{QUIETER}": (
        decoded(TARGET_ALONE, (1, 1, 1), cores=1.5),
        10,
    ),
    f"{BUSY}a step of the target alone took 1.67 times its median on average, normally at most"
    f" 1.2{QUIETER}": (decoded(TARGET_ALONE, (1, 1, 3)), 10),
    "Only 7 independent prompts were decoded, at least 8 are needed for intervals; decode more"
    " (num_live_prompts=).": (ALONE, 7),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_each_doubt_is_one_sentence_with_its_remedy(doubt):
    alone, num_groups = DOUBTS[doubt]
    measured = [alone, decoded(SHORT, (0.5, 0.5, 0.5))]
    groups = [number % num_groups for number in range(10)]
    assert list(doubts_of(measured, groups)) == [doubt] * bool(doubt)


def around(value, width):
    """Resampled speed-ups whose interval is `width` to both sides of the estimate."""
    return value + np.concatenate([[0.0], np.tile([-width, width], NUM_RESAMPLES // 2)])


def test_replay_and_decoding_disagree_where_their_intervals_do_not_meet():
    measured = [ALONE, decoded(SHORT, (0.5, 0.5, 0.5)), decoded(LONG, (0.4, 0.4, 0.4))]
    near = {SHORT.name: around(2.05, 0.1), LONG.name: around(2.55, 0.1)}
    assert [*disagreements_of(measured, near, range(10))] == []
    far = near | {SHORT.name: around(1.5, 0.1)}
    over_alone, over_fixed = disagreements_of(measured, far, range(10))
    assert over_alone == (
        f"{SHORT.name} over target alone 1.50× [1.40, 1.60] by replay, 2.00× [2.00, 2.00] decoded"
    )
    assert over_fixed.startswith(f"{LONG.name} over {SHORT.name} ")
    assert over_fixed.endswith(" 1.25× [1.25, 1.25] decoded")
    # Speeds within their intervals whose ratio is not
    shifted = {SHORT.name: around(2.1, 0.11), LONG.name: around(2.4, 0.11)}
    (over_fixed,) = disagreements_of(measured, shifted, range(10))
    assert over_fixed.startswith(LONG.name)
    assert [*disagreements_of(measured, far, [0] * 10)] == []  # too few groups


def test_the_tokens_of_a_round_share_its_seconds_equally():
    rounds = [[DecodedRound(3, 0, 0, 0.2, 0.4), DecodedRound(1, 0, 0, 0.1, 0.4)]]
    measured = Measured(TARGET_ALONE, rounds=rounds, load=[(2.0, 1.0), (0.0, 3.0)])
    assert measured.token_seconds == pytest.approx([0.2, 0.2, 0.2, 0.5])
    assert measured.pace == pytest.approx([0.2, 0.5]) and measured.cores_taken == 0.5
    assert replace(measured, load=[]).cores_taken == 0.0
