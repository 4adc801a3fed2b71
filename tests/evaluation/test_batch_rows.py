"""Rows of a report, from runs given by hand, and what is decoded for them."""

from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from specheads import Warp, stopping
from specheads.decoding.records import DecodeStats
from specheads.evaluation import batches
from specheads.evaluation.batches import (
    BatchRun,
    batch_rows,
    best_fixed,
    decode_batches,
    run_batches,
)
from specheads.evaluation.candidates import TARGET_ALONE, Candidate, fixed_length
from specheads.evaluation.replayed_sets import Outcome
from specheads.evaluation.report import BatchTable
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import Sweep, response_seed


def run(seconds, *responses):
    """A run of responses, each the seconds of its prompt and the tokens and seconds of its
    rounds.
    """
    stats = [
        DecodeStats(
            sum(n for n, _ in rounds),
            0,
            0,
            0,
            len(rounds),
            0,
            prefill + sum(s for _, s in rounds),
            prefill,
        )
        for prefill, rounds in responses
    ]
    return BatchRun(seconds, stats, [rounds for _, rounds in responses])


SLOW = run(8.0, (0.1, [(1, 0.4), (1, 0.5)]), (0.2, [(1, 0.6), (1, 0.2)]))
FAST = run(1.0, (0.1, [(2, 0.4)]), (0.1, [(1, 0.2), (1, 0.2)]))
MIDDLE = run(2.0, (0.1, [(2, 0.9)]), (0.2, [(2, 0.3)]))


def test_the_numbers_of_rows_are_those_computed_by_hand():
    settings = [
        TARGET_ALONE,
        Candidate(
            "a family", "fast", None, None, rule_name="head_threshold", head="mine", automatic=True
        ),
    ]
    alone, fast = batch_rows(settings, [[SLOW, SLOW], [FAST, MIDDLE]], ["a", "b"])
    assert (alone.tokens_per_second, alone.over_alone, alone.tokens_per_round) == (0.5, 1.0, 1.0)
    assert fast.tokens_per_second == (4 + 2) / 2  # the median of two runs
    assert fast.over_alone == (8 + 4) / 2
    assert (fast.name, fast.family, fast.lossless, fast.rule_name, fast.head) == (
        "fast",
        "a family",
        True,
        "head_threshold",
        "mine",
    )
    assert fast.automatic and not alone.automatic
    # Requests: 2 tokens in 1.0, 1.0, 0.5, 0.5, 1.0 and 0.5 seconds.
    assert alone.request_tokens_per_second == pytest.approx(2.0)
    assert fast.request_tokens_per_second == pytest.approx((2 / 0.5 + 2 / 0.5) / 2)
    assert fast.speedup.value == pytest.approx((8 / 2.5) / (8 / 4.0))
    assert fast.speedup.low <= fast.speedup.value <= fast.speedup.high
    # Tokens of the fast setting: 0.2, 0.2, 0.2, 0.2, then 0.45, 0.45, 0.15, 0.15 seconds.
    assert fast.token_ms["p50"] == pytest.approx(200)
    assert fast.token_ms["p90"] == pytest.approx(
        450
    )  # places 6 and 7 of the sorted ones, counted from 0
    assert fast.first_token_ms["p50"] == pytest.approx(500)  # of 300, 500, 500, 1000
    assert alone.first_token_ms["p99"] == pytest.approx(800)
    assert fast.tokens_per_round == pytest.approx(8 / 5)


def test_runs_of_other_settings_are_refused():
    settings = [TARGET_ALONE, Candidate("a family", "fast", None, None)]
    for runs in ([[SLOW], [FAST], [FAST]], [[SLOW], [FAST, MIDDLE]]):
        with pytest.raises(ValueError, match="argument"):
            batch_rows(settings, runs, ["a", "b"])


def test_repeated_prompts_are_resampled_together():
    """Where both requests are of one prompt there is nothing to resample."""
    settings = [TARGET_ALONE, Candidate("fixed_length", "fast", None, None)]
    _, one = batch_rows(settings, [[SLOW], [FAST]], ["a"])
    assert one.speedup.low == one.speedup.value == one.speedup.high


LINES = {"prompts": [("a", [1]), ("b", [2]), ("c", [3])], "groups": ["x", "x", "y"]}
OTHERS = [Candidate("logistic", "logistic", *[stopping.MaxProbability(0.5, 4)] * 2)]


@pytest.fixture
def setup(monkeypatch):
    """An evaluation of three prompts, of which two dev prompts are given.

    What its batches ask for is kept.
    """
    kept = SimpleNamespace(journals=[], runs=[], shown=[], advance=None)

    @contextmanager
    def progress(name, total):
        kept.shown.append((name, total))
        yield "advance"

    def runs(sweep, settings, requests, size, journal, advance=None):
        kept.runs.append((sweep, list(settings), requests, size, journal, advance))
        return [
            [SimpleNamespace(tokens_per_second=each.parameters["num_tokens"] % 8)]
            for each in settings
            if each.parameters
        ]

    def journal(name, prompts, **more):
        kept.journals.append((name, prompts, more))
        return name

    monkeypatch.setattr(batches, "progress", progress)
    monkeypatch.setattr(batches, "run_batches", runs)
    monkeypatch.setattr(
        batches,
        "batch_rows",
        lambda settings, runs, groups: ([each.name for each in settings], len(runs), groups),
    )
    monkeypatch.setattr(batches, "best_of_kinds", lambda outcome: [outcome.candidates[-1], *OTHERS])
    dev = SimpleNamespace(prompts=[("d", [7]), ("e", [8])])
    prompts = SimpleNamespace(decoded=SimpleNamespace(**LINES), dev=dev)
    settings = Evaluation(concurrency=(1, 4), repeats=2, max_new_tokens=5)
    return SimpleNamespace(
        settings=settings,
        prompts=prompts,
        pair="pair",
        window=9,
        run_folder="runs",
        journal=journal,
        kept=kept,
    )


def test_every_size_decodes_the_target_its_fixed_length_and_the_best_rules(setup):
    """Enough requests for two in a row.

    Of lengths up to eight dev prompts choose 6, the fastest by the fixture.
    """
    outcome = Outcome([*OTHERS, *map(fixed_length, (12, 8, 6, 3))], None)
    tables = decode_batches(setup, outcome)
    names = ["target alone", "fixed_length(num_tokens=6)", "logistic"]
    assert tables == [
        BatchTable(1, 3, (names, 2, LINES["groups"])),
        BatchTable(4, 8, (names, 2, LINES["groups"])),
    ]
    assert setup.kept.shown == [("decoding batches", 2 * 3 * (3 + 8))]
    lengths = [f"fixed_length(num_tokens={k})" for k in (3, 6, 8)]
    dev = setup.prompts.dev.prompts
    assert setup.kept.journals == [
        ("batches-1-dev", dev, {"settings": lengths, "rows": 1}),
        ("batches-4-dev", dev, {"settings": lengths, "rows": 4}),
        ("batches-1", LINES["prompts"], {"settings": names, "rows": 1}),
        ("batches-4", LINES["prompts"], {"settings": names, "rows": 4}),
    ]
    sweep, once = (Sweep("pair", setup.settings.but(repeats=repeats), 9) for repeats in (2, 1))
    assert [(each[0], *each[2:]) for each in setup.kept.runs] == [
        (once, [[7], [8]], 1, "batches-1-dev", None),
        (once, [[7], [8]] * 4, 4, "batches-4-dev", None),
        (sweep, [[1], [2], [3]], 1, "batches-1", "advance"),
        (sweep, [[1], [2], [3], [1], [2], [3], [1], [2]], 4, "batches-4", "advance"),
    ]


def test_where_all_lengths_are_long_the_shortest_is_decoded(setup):
    decode_batches(setup, Outcome([*map(fixed_length, (14, 12))], None))
    assert [each.name for each in setup.kept.runs[0][1]] == ["fixed_length(num_tokens=12)"]
    assert best_fixed(setup, [fixed_length(3), fixed_length(7)], 1).parameters == {"num_tokens": 7}


class Kept:
    """A journal in memory."""

    def __init__(self, entries):
        self.entries = dict(entries)
        self.added = []

    def add(self, number, entry):
        self.added.append((number, entry["seconds"]))


def test_settings_take_turns_and_journalled_runs_are_kept(monkeypatch):
    """Two repeats of three settings: the second repeat begins with the second setting."""
    decoded = []
    steps = []

    def made(given, decoder, requests, size, repeat, on_generation):
        assert given is sweep
        decoded.append((decoder, requests, size, repeat))
        on_generation(len(requests))
        return {
            "seconds": len(decoded),
            "stats": [asdict(DecodeStats(1, 0, 0, 0, 1, 0, 1.0, 0.0))],
            "rounds": [[[1, 1.0]]],
        }

    def ready(given, settings, requests, size):
        assert given is sweep and requests == [[1], [2]] and size == 4
        return [each.name for each in settings]

    monkeypatch.setattr(batches, "_ready", ready)
    monkeypatch.setattr(batches, "_decoded", made)
    sweep = Sweep(None, Evaluation(repeats=2), 9)
    settings = [TARGET_ALONE, fixed_length(1), fixed_length(2)]
    names = [each.name for each in settings]
    requests = [[1], [2]]
    journal = Kept({})
    runs = run_batches(sweep, settings, requests, 4, journal, steps.append)
    order = [
        (names[index], requests, 4, repeat)
        for index, repeat in ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (0, 1))
    ]
    assert decoded == order and [number for number, _ in journal.added] == [0, 1, 2, 4, 5, 3]
    assert [[run.seconds for run in made] for made in runs] == [
        [1, 6],
        [2, 4],
        [3, 5],
    ] and steps == [0, *[2] * 6]
    assert runs[0][0].stats == [DecodeStats(1, 0, 0, 0, 1, 0, 1.0, 0.0)] and runs[0][0].rounds == [
        [[1, 1.0]]
    ]
    entry = {"seconds": 50, "stats": [], "rounds": []}
    some = Kept({0: entry, 4: entry})
    steps.clear()
    runs = run_batches(sweep, settings, requests, 4, some, steps.append)
    assert [[run.seconds for run in made] for made in runs] == [
        [50, 10],
        [7, 50],
        [8, 9],
    ] and steps == [4, *[2] * 4]
    monkeypatch.setattr(batches, "_ready", None)  # nothing is compiled where all is known
    runs = run_batches(sweep, settings, requests, 4, Kept(dict.fromkeys(range(6), entry)))
    assert [[run.seconds for run in made] for made in runs] == [[50, 50]] * 3


class FakeDecoder:
    """What stands for a decoder; it answers the last request first."""

    def __init__(self, *values, **named):
        self.values = values
        self.named = named
        self.calls = []
        self.target_engine = "engine"

    def with_stopping(self, rule):
        return FakeDecoder("stops by", rule)

    def generate_batch(self, requests, *, max_batch, max_new_tokens, seeds, as_completed=False):
        self.calls.append((requests, max_batch, max_new_tokens, seeds, as_completed))
        for number in reversed(range(len(requests))):
            rounds = [SimpleNamespace(tokens=[1] * (number + 1), seconds=0.5)]
            yield (
                number,
                SimpleNamespace(stats=DecodeStats(number, 0, 0, 0, 1, 0, 1.0, 0.0), rounds=rounds),
            )


def test_responses_are_kept_in_the_order_of_their_requests():
    how = Evaluation(seed=5, max_new_tokens=6)
    decoder = FakeDecoder()
    steps = []
    entry = batches._decoded(Sweep(None, how, 9), decoder, [[1], [2], [3]], 2, 7, steps.append)
    seeds = [response_seed(5, number, 7) for number in range(3)]
    assert decoder.calls == [([[1], [2], [3]], 2, 6, seeds, True)] and steps == [1, 1, 1]
    assert [part["num_tokens"] for part in entry["stats"]] == [0, 1, 2] and 0 < entry[
        "seconds"
    ] < 60
    assert entry["rounds"] == [[[1, 0.5]], [[2, 0.5]], [[3, 0.5]]]


@pytest.mark.parametrize("captures", [False, True])
def test_every_setting_is_warm_before_it_is_timed(monkeypatch, captures):
    """As many requests as there are rows, and all where steps are captured for each combination of
    sizes.
    """
    monkeypatch.setattr(batches, "SpeculativeDecoder", FakeDecoder)
    monkeypatch.setattr(batches, "Baseline", FakeDecoder)
    monkeypatch.setattr(batches, "GraphEngine", str if captures else int)
    how = Evaluation(warp=Warp(temperature=0.5), engine="eager", max_new_tokens=6)
    alone, drafting = batches._ready(
        Sweep("pair", how, 9), [TARGET_ALONE, OTHERS[0]], [[1], [2], [3]], 2
    )
    assert alone.values == ("pair", how.warp, "eager", 9) and drafting.values == (
        "stops by",
        OTHERS[0].live,
    )
    warm = [[1], [2], [3]] if captures else [[1], [2]]
    seeds = [response_seed(how.seed, number, 0) for number in range(len(warm))]
    assert alone.calls == drafting.calls == [(warm, 2, 6, seeds, True)]


def test_memory_is_shared_by_all_settings_that_draft(monkeypatch):
    made = []
    monkeypatch.setattr(
        batches,
        "SpeculativeDecoder",
        lambda *values, **named: made.append((values, named)) or FakeDecoder(),
    )
    monkeypatch.setattr(batches, "Baseline", FakeDecoder)
    how = Evaluation(warp=Warp(temperature=0.5), engine="eager")
    batches._ready(Sweep("pair", how, 9), [*OTHERS, fixed_length(2)], [[1]], 1)
    assert made == [(("pair",), {"warp": how.warp, "engine": "eager", "window": 9})]
