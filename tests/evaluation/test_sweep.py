"""Sweeps of many settings, the doubts about their times, and the costs that follow, from rounds
given by hand.
"""

from dataclasses import asdict
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from specheads import Warp, stopping
from specheads.decoding.records import DecodeStats, Round
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.decoding.verification import BlockVerification
from specheads.evaluation import sweep as module
from specheads.evaluation.candidates import (
    OF_VERIFICATION,
    TARGET_ALONE,
    Candidate,
    CostTable,
    fixed_length,
)
from specheads.evaluation.report import MEASURED
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import (
    FEWEST_GROUPS,
    Measured,
    Sweep,
    doubts_of,
    response_seed,
    round_times,
    sweep_settings,
    with_measured,
)
from specheads.load import NOTABLE
from specheads.replay.cost import CostFit

SHORT = fixed_length(1)
LONG = fixed_length(6)
RULE = stopping.MaxProbability(0.5, 4)
PRODUCT = Candidate("product", "product", *[stopping.DraftProduct(0.5)] * 2)


def headed(head, rule=RULE, **values):
    return Candidate("head", f"{head} {rule}", rule, rule, head=head, **values)


class Decoder:
    """What stands for a decoder, and keeps what it was asked for."""

    log: ClassVar[list] = []

    def __init__(self, *values):
        self.values = values
        self.target_engine = "engine"
        self.name = "alone"

    def with_stopping(self, rule, verification):
        other = Decoder(rule, verification)
        other.name = f"{type(rule).__name__} {rule.max_tokens}"
        return other

    def prepare(self):
        self.log.append(("prepare", self.name))

    def warm_up(self):
        self.log.append(("warm up", self.name))

    def generate(self, prompt, max_new_tokens, seed):
        self.log.append((self.name, prompt, max_new_tokens, seed))
        rounds = [
            Round([1, 2], 3, 1, 2, 4, 0.5, 0.25, 0.125),
            Round([3], 1, 0, 1, 1, 1.0, 2.0, 3.0),
        ]
        return SimpleNamespace(stats=DecodeStats.of(rounds, prefill_seconds=1.0), rounds=rounds)


@pytest.fixture
def decoders(monkeypatch):
    """Stand-ins for the decoders, the compiler and the load; returns the log of what was done."""
    monkeypatch.setattr(Decoder, "log", [])
    monkeypatch.setattr(module, "SpeculativeDecoder", Decoder)
    monkeypatch.setattr(module, "Baseline", Decoder)
    monkeypatch.setattr(module, "compile_ahead", lambda prepare: [each() for each in prepare])
    monkeypatch.setattr(
        module,
        "OthersLoad",
        lambda: SimpleNamespace(taken=lambda threads: 0.5 if threads > 0 else None),
    )
    return Decoder.log


class Kept:
    """A journal in memory."""

    def __init__(self, **entries):
        self.entries = {int(number[1:]): entry for number, entry in entries.items()}
        self.added = []

    def add(self, number, entry):
        self.entries[number] = entry
        self.added.append((number, entry))


def test_settings_take_turns_prompt_by_prompt_and_share_seeds(decoders):
    """Each prompt and each repeat begins with the next setting, after all are compiled, warm and
    have answered once.
    """
    how = Evaluation(repeats=2, max_new_tokens=3, seed=5)
    steps = []
    journal = Kept()
    measured = Sweep("pair", how, 9).run(
        [TARGET_ALONE, SHORT, LONG], [[1], [2]], journal, steps.append
    )
    names = ["alone", "FixedLength 1", "FixedLength 6"]
    first = (
        [("prepare", name) for name in names]
        + [("warm up", name) for name in names]
        + [(name, [1], 3, 5) for name in names]
    )
    assert decoders[:9] == first
    starts = {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 2}  # by prompt and repeat
    turns = [
        (names[(place + start) % 3], *key) for key, start in starts.items() for place in range(3)
    ]
    assert decoders[9:] == [
        (name, [[1], [2]][prompt], 3, response_seed(5, prompt, repeat))
        for name, prompt, repeat in turns
    ]
    assert steps == [0, *[1] * 12] and [number for number, _ in journal.added] == [0, 1]
    assert [each.setting for each in measured] == [TARGET_ALONE, SHORT, LONG]
    for each in measured:
        assert (
            each.stats == [DecodeStats(6, 8, 2, 6, 4, 10, 2 + 2 * 6.875, 2.0)] * 2
        )  # both repeats
        assert each.rounds == [[[2, 3, 4, 0.5, 0.375], [1, 1, 1, 1.0, 5.0]] * 2] * 2
        assert [cores for cores, _ in each.load] == [0.5, 0.5] and all(
            0 <= seconds < 60 for _, seconds in each.load
        )
    entry = journal.added[0][1]
    assert set(entry) == {"stats", "rounds", "load"} and [len(each) for each in entry["stats"]] == [
        2,
        2,
        2,
    ]


def test_journalled_prompts_are_not_decoded_again(decoders):
    how = Evaluation(repeats=2, max_new_tokens=3)
    steps = []
    stats = [[asdict(DecodeStats(7, 0, 0, 0, 7, 0, 1.0, 0.0))] * 2]
    journal = Kept(_1={"stats": stats, "rounds": [[[1, 0, 0, 0.0, 1.0]]], "load": (0.25, 2.0)})
    with pytest.raises(ValueError, match="argument"):  # the journal of another number of settings
        Sweep("pair", how, 9).run([TARGET_ALONE, SHORT], [[1], [2]], journal, steps.append)
    assert steps == [4, 1, 1, 1, 1]
    decoders.clear()
    steps.clear()
    journal.added.clear()
    del journal.entries[0]
    (alone,) = Sweep("pair", how, 9).run([TARGET_ALONE], [[1], [2], [3]], journal, steps.append)
    assert steps == [2, 1, 1, 1, 1] and [number for number, _ in journal.added] == [0, 2]
    assert (
        alone.stats[1].num_tokens == 14
        and alone.rounds[1] == [[1, 0, 0, 0.0, 1.0]]
        and alone.load[1] == (0.25, 2.0)
    )
    assert [each[1] for each in decoders if each[0] == "alone"] == [[1], [1], [1], [3], [3]]
    (without,) = Sweep("pair", how, 9).run([TARGET_ALONE], [[1]])
    assert len(without.stats) == 1


def test_settings_share_the_memory_of_the_longest_drafts(decoders):
    how = Evaluation(warp=Warp(temperature=0.5), engine="eager")
    block = BlockVerification()
    under = Candidate("block", "block", SHORT.live, SHORT.live, verification=block)
    alone, short, long, other = Sweep("pair", how, 9)._decoders([TARGET_ALONE, SHORT, LONG, under])
    assert alone.values == ("pair", how.warp, "engine")
    assert (short.values, long.values) == (
        (SHORT.live, None),
        (LONG.live, None),
    ) and other.values == (SHORT.live, block)
    made = []
    module.SpeculativeDecoder = lambda *values: (
        made.append(values) or Decoder()
    )  # undone by the fixture
    Sweep("pair", how, 9)._decoders([TARGET_ALONE, SHORT, LONG])
    Sweep("pair", how, 9)._decoders([TARGET_ALONE])
    assert made == [
        ("pair", how.drafting, longest, how.verification, how.warp, "eager", 9)
        for longest in (LONG.live, None)
    ]


def test_the_settings_of_a_sweep_are_those_that_can_decode():
    bound = Candidate("ceiling", "bound", RULE, None)
    assert sweep_settings([SHORT, bound, LONG]) == [TARGET_ALONE, SHORT, LONG]
    _, own = sweep_settings([], RULE)
    assert (own.family, own.name, own.rule, own.live) == (
        OF_VERIFICATION,
        str(RULE.compile_key).replace("_", " "),
        RULE,
        RULE,
    )
    assert own.parameters == {"num_tokens": 0} and "_" in str(RULE.compile_key)


def alone(*seconds, load=()):
    """The target alone with rounds of these seconds."""
    return Measured(
        TARGET_ALONE, rounds=[[[1, 0, 0, 0.0, each] for each in seconds]], load=list(load)
    )


QUIET = alone(1, 1, 1)
FREE = CostFit(StepCosts(0.0, 1.0), {"a": RuleCosts(0.0), "b": RuleCosts(0.1)})


BUSY = "The machine was busy: "
QUIETER = "; live figures need a quiet machine."
PLAIN = CostFit(StepCosts(1, 1))
DOUBTS = {  # and what raises none, at the bounds
    f"{BUSY}other processes took 1.2 of its cores while it decoded{QUIETER}": (
        alone(1, 1, load=[(1.0, 3.0), (2.0, 1.0)]),
        PLAIN,
        8,
    ),
    f"{BUSY}a step of the target alone took 1.50 times its median on average, normally at most 1.2{QUIETER}": (
        alone(1, 1, 1, 3),
        PLAIN,
        8,
    ),
    f"{BUSY}no cost of a draft step could be told from these rounds{QUIETER}": (QUIET, FREE, 8),
    "Only 7 independent prompts were decoded, at least 8 are needed for intervals; decode more (num_live_prompts=).": (
        QUIET,
        PLAIN,
        7,
    ),
    "": (alone(1, 1, 1, 1, 2, load=[(NOTABLE, 1.0)]), PLAIN, FEWEST_GROUPS),
    " ": (QUIET, CostFit(StepCosts(0.0, 1.0), {"a": RuleCosts(0.0, 0.1)}), 8),
    "  ": (QUIET, CostFit(StepCosts(0.1, 1.0), FREE.rules), 8),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_each_doubt_is_one_sentence_with_its_remedy(doubt):
    measured, fit, groups = DOUBTS[doubt]
    others = Measured(SHORT, rounds=[[[1, 1, 1, 9.0, 9.0]]], load=[(9.0, 9.0)])
    assert list(doubts_of([measured, others], fit, [number % groups for number in range(20)])) == [
        doubt
    ] * bool(doubt.strip())


def of(setting, *rounds, prompts=3):
    """A setting with the same rounds on each prompt: drafted tokens, draft calls and the seconds of
    both.
    """
    return Measured(setting, rounds=[[[1, *each] for each in rounds] for _ in range(prompts)])


def test_the_two_halves_of_the_responses_have_every_setting():
    """Responses to a prompt have numbers of one parity, and no two share a number."""
    mine = headed("mine")
    under = Candidate(
        "fixed_length", "block", LONG.live, LONG.live, verification=BlockVerification()
    )
    measured = [
        QUIET,
        of(SHORT, (1, 2, 0.5, 0.25), (1, 1, 0.5, 0.75)),
        of(mine, (4, 5, 2.0, 1.0)),
        of(under, (6, 6, 3.0, 1.0)),
    ]
    times, kinds = round_times(measured)
    assert kinds == {
        "FixedLength": True,
        "MaxProbability of mine": False,
        "FixedLength under block verification": False,
    }
    assert (
        times.drafted.tolist() == [1] * 6 + [4] * 3 + [6] * 3
        and times.draft_calls.tolist() == [2, 1] * 3 + [5] * 3 + [6] * 3
    )
    assert times.draft_seconds.tolist() == [0.5] * 6 + [2.0] * 3 + [3.0] * 3
    assert times.target_seconds.tolist() == [0.25, 0.75] * 3 + [1.0] * 6
    assert times.rule.tolist() == [0] * 6 + [1] * 3 + [2] * 3
    assert (times.response % 2).tolist() == [0, 0, 1, 1, 0, 0] + [0, 1, 0] * 2
    assert len(set(times.response.tolist())) == 9 and times.response.min() == 0


STEP = 0.001
PASS = 0.004


def timed(setting, more=0.0, learning=0.0):
    """Rounds of one to six drafted tokens on ten prompts, `more` seconds for each draft step,
    `learning` for each round.
    """
    rounds = [
        (n, n, (STEP + more) * n, PASS + 0.0001 * n + learning) for n in (1, 2, 3, 4, 5, 6) * 5
    ]
    return of(setting, *rounds, prompts=10)


SIZES = {"small": 0.1, "middle": 0.2, "large": 0.5}


def test_the_target_alone_is_as_fast_as_its_own_steps():
    """Not as the rounds of drafting settings let expect."""
    slow = alone(*[0.005] * 30, 0.02)
    measured = [
        slow,
        timed(SHORT),
        timed(headed("mine", verification=BlockVerification()), 0.0002, 0.0003),
    ]
    table = with_measured(
        CostTable({"10": StepCosts.at_ratio(10)}, {"mine": 0.1}), measured, {"mine": 0.1}
    )
    assert list(table.costs) == [MEASURED, "10"] and table.head_shares == {"mine": 0.1}
    assert table.costs[MEASURED].target_seconds == pytest.approx(
        PASS
    ) and table.alone == pytest.approx(1 / 0.005)
    assert (
        table.untimed == {} and table.measured_heads == {} and not table.ends
    )  # nothing is known under token verification
    assert len(table.halves) == 2 and all(half.alone == table.alone for half in table.halves)
    # A head's cost that was timed by itself is believed.
    kind = measured[2].setting.kind
    shared = with_measured(CostTable({}), measured, {"mine": 0.1}, {kind: 0.5})
    assert shared.fit.rules[kind].step_seconds == pytest.approx(0.5 * STEP, rel=0.01)
    assert table.fit.rules[kind].step_seconds == pytest.approx(0.0002, rel=0.01)


def test_steps_that_were_timed_by_themselves_replace_rounds():
    mine = headed("mine")
    measured = [alone(0.005, 0.005), timed(SHORT), timed(mine, 0.0002), timed(PRODUCT)]
    ends = [
        StepTimes(StepCosts(step, 2 * step), {mine.step_kind: RuleCosts(step / 4)})
        for step in (1.0, 2.0, 4.0)
    ]
    table = with_measured(CostTable({}), measured, {"mine": 0.1}, ends=ends)
    assert [each.costs[MEASURED].draft_seconds for each in table.ends] == [
        1.0,
        2.0,
        4.0,
    ] and not table.halves
    assert (
        table.costs[MEASURED] == StepCosts(2.0, 4.0)
        and table.alone == 0.25
        and table.measured_heads == {"mine": 0.5}
    )
    assert table.fit.rules == {
        "FixedLength": RuleCosts(),
        "MaxProbability of mine": RuleCosts(0.5),
        "DraftProduct": RuleCosts(),
    }


def test_a_head_has_the_mean_of_its_rules_and_others_lie_between():
    rules = {
        "large 1": RuleCosts(0.8),
        "small 1": RuleCosts(0.1),
        "small 2": RuleCosts(0.3),
        "none": RuleCosts(9.0),
    }
    heads = {"large 1": "large", "small 1": "small", "none": None, "small 2": "small"}
    fit = CostFit(StepCosts(1, 1), rules)
    assert module._head_seconds(fit, heads, SIZES | {"tiny": 0.01}) == pytest.approx(
        {"small": 0.2, "middle": 0.2 + 0.6 / 4, "large": 0.8, "tiny": 0.2}
    )
    assert module._head_seconds(fit, {"none": None}, SIZES) == {}


def test_rules_that_were_not_timed_cost_the_median_of_those_that_were():
    """A head's own step is known by itself.

    A fixed length and what was decoded under another verification say nothing.
    """
    costs = {"a": (1, 4), "b": (3, 6), "c": (8, 5), "mine": (9, 7), "K": (99, 99)}
    rules = {name: RuleCosts(*each) for name, each in costs.items()}
    kinds = dict.fromkeys(rules, False) | {"K": True, "under block": False}
    heads = dict.fromkeys(rules) | {"mine": "mine"}
    found = module._untimed(CostFit(StepCosts(1, 1), rules), kinds, heads)
    assert found == {False: RuleCosts(3.0, 5.0), True: RuleCosts(0.0, 7.0)}


def test_seeds_differ_by_prompt_and_repeat():
    cases = (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)
    seeds = [response_seed(*each) for each in cases]
    assert len(set(seeds)) == 5 and seeds == [response_seed(*each) for each in cases]
    assert all(isinstance(seed, int) and 0 <= seed < 2**32 for seed in seeds)


def test_shares_of_a_sweep_are_per_token():
    measured = Measured(
        TARGET_ALONE,
        rounds=[[[3, 0, 0, 0.2, 0.4]], [[2, 0, 0, 0.0, 0.2]]],
        load=[(2.0, 1.0), (0.0, 3.0)],
    )
    assert measured.pace == pytest.approx([0.2, 0.1]) and measured.cores_taken == 0.5
    assert Measured(TARGET_ALONE).cores_taken == 0.0 and np.median(
        measured.token_seconds
    ) == pytest.approx(0.2)
