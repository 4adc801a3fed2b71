"""Which settings an evaluation decodes, and how often, with stand-ins for what decodes."""

import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specheads import AcceptanceHead, HeadConfig, papers, stopping
from specheads.decoding.drafting import Autoregressive
from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.decoding.verification import BlockVerification, TokenVerification
from specheads.evaluation import decode
from specheads.evaluation.candidates import TARGET_ALONE, Candidate, CostTable, fixed_length
from specheads.evaluation.decode import (
    best_of_kinds,
    decoded_counts,
    settle,
    tried_on_dev,
    under_block,
)
from specheads.evaluation.prompt_sets import PromptSet
from specheads.evaluation.replayed_sets import Outcome, RecordedSet
from specheads.evaluation.report import MEASURED
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import Measured, Sweep
from specheads.prompts.prompt import Prompt
from specheads.replay.cost import CostFit

ONE, TWO, THREE, FOUR, FIVE, SIX = map(fixed_length, range(1, 7))
HEADS = {name: AcceptanceHead(HeadConfig(8, 0)) for name in ("small", "middle", "large")}
RULE = stopping.MaxProbability(0.5, 4)
LOGISTIC = Candidate("logistic", "logistic", RULE, RULE, rule_name="max_probability")


def headed(name):
    rule = stopping.HeadThreshold(HEADS["small"], 0.5)
    return Candidate("head_threshold", name, rule, rule, rule_name="head_threshold", head="small")


def test_a_decoded_setting_stands_for_its_kind_where_another_one_is_hardly_faster():
    """Four turns of decoding once chose between settings that were 1 % apart."""
    head = replace(fixed_length(1), family="head_threshold", name="head 0.6", head="some")
    rules = [
        fixed_length(3),
        fixed_length(4),
        fixed_length(5),
        head,
        replace(head, name="head 0.7"),
    ]
    speeds = {MEASURED: [1.50, 1.52, 1.40, 1.45, 1.55]}
    outcome: Any = SimpleNamespace(candidates=rules, speeds=speeds, achievable=lambda ratio: [1, 4])

    def chosen(*decoded):
        return [rule.name for rule in best_of_kinds(outcome, decoded)]

    assert chosen() == ["fixed_length(num_tokens=4)", "head 0.7"]
    assert chosen("fixed_length(num_tokens=3)", "fixed_length(num_tokens=5)", "head 0.6") == [
        "fixed_length(num_tokens=3)",
        "head 0.7",
    ]  # a head 7 % slower is not enough
    assert chosen("fixed_length(num_tokens=5)") == ["fixed_length(num_tokens=4)", "head 0.7"]


def test_of_each_kind_the_fastest_at_the_measured_costs_is_chosen():
    """Of decoded ones within a tie the fastest, unless it was fitted to another ratio.

    The kinds keep their order.
    """
    fitted = replace(headed("for ten"), ratio="10")
    rules = [
        LOGISTIC,
        headed("slow"),
        headed("fast"),
        ONE,
        TWO,
        THREE,
        fitted,
        replace(LOGISTIC, name="slower"),
    ]
    speeds = {MEASURED: [1.4, 1.1, 1.3, 1.96, 2.0, 1.98, 1.3, 1.0]}
    asked: list[str] = []
    best = [7, 1, 3, 0, 4, 2]
    outcome: Any = SimpleNamespace(
        candidates=rules, speeds=speeds, achievable=lambda ratio: asked.append(ratio) or best
    )

    def chosen(*decoded):
        return [rule.name for rule in best_of_kinds(outcome, decoded)]

    assert chosen() == [TWO.name, "fast", "logistic"] and asked == [MEASURED]
    assert chosen(ONE.name, "for ten", "slower") == [
        ONE.name,
        "fast",
        "logistic",
    ]  # 2 % slower is a tie
    assert (
        chosen(ONE.name, THREE.name)
        == [THREE.name, "fast", "logistic"]
        != chosen(TWO.name, THREE.name)
    )
    speeds[MEASURED][3] = 1.95
    assert chosen(ONE.name) == [TWO.name, "fast", "logistic"]
    best[:] = [0]
    assert best_of_kinds(outcome) == [LOGISTIC]


def test_what_drafts_is_tried_under_block_verification_too():
    (made,) = under_block([TARGET_ALONE, TWO])
    assert (made.family, made.name, made.live) == (
        "block",
        f"{TWO.name} verification=block",
        TWO.live,
    )
    assert isinstance(made.verification, BlockVerification)


@dataclass(frozen=True)
class Settled(Outcome):
    """An outcome that only remembers how often the best were chosen."""

    turns: int = 0

    def chosen(self):
        return replace(self, turns=self.turns + 1)


@pytest.fixture
def settling(monkeypatch):
    """Settle on what is chosen in each turn; returns the outcome and what was decoded in turns."""

    def run(choices, doubts=(), groups=8, fit=True):
        turns = iter(choices)
        doubtful = iter(doubts)
        log = SimpleNamespace(sweeps=[], tuned=[], chosen=[], costs=[])

        def swept(setup, name, settings, prompts):
            assert setup is log.setup
            log.sweeps.append((name, [each.name for each in settings], prompts))
            return [Measured(each) for each in settings]

        def chosen(evaluation, outcome, decoded):
            log.chosen.append((evaluation, list(decoded), outcome.turns))
            return next(turns)

        def costs(setup, measured):
            assert setup is log.setup
            log.costs.append([each.setting.name for each in measured])
            return CostTable({}, fit=CostFit(StepCosts(1, 1)) if fit else None)

        def tuned(setup, outcome, tuning):
            assert (setup, tuning) == (log.setup, "tuning")
            log.tuned.append(len(log.sweeps))
            return outcome

        def doubts_of(measured, fit, groups):
            assert (fit, groups) == (CostFit(StepCosts(1, 1)), "groups")
            assert [each.setting.name for each in measured] == log.sweeps[-1][1]
            return next(doubtful, [])

        monkeypatch.setattr(decode, "sweep", swept)
        monkeypatch.setattr(decode, "_chosen_settings", chosen)
        monkeypatch.setattr(decode, "measured_costs", costs)
        monkeypatch.setattr(decode, "_tuned_again", tuned)
        monkeypatch.setattr(decode, "doubts_of", doubts_of)
        monkeypatch.setattr(
            decode,
            "decoded_counts",
            lambda outcome, settings: {each.name: outcome.turns for each in settings},
        )
        monkeypatch.setattr(
            decode, "settle_by_steps", lambda setup, outcome, tuning: (outcome, setup, tuning)
        )
        decoded = SimpleNamespace(prompts="prompts", groups="groups")
        log.setup = SimpleNamespace(settings="evaluation", prompts=SimpleNamespace(decoded=decoded))
        sets: Any = [RecordedSet(role, role, None, range(groups)) for role in ("dev", "test")]
        return settle(log.setup, Settled([], CostTable({}), sets), "tuning", [Measured(ONE)]), log

    return run


def test_what_is_best_at_the_costs_of_what_was_decoded_is_decoded_too(settling):
    outcome, log = settling(
        [[TARGET_ALONE, ONE, *under_block([ONE])], [TARGET_ALONE, TWO], [TARGET_ALONE, TWO]]
    )
    first, second = [names for _, names, _ in log.sweeps]
    assert first == ["target alone", ONE.name, f"{ONE.name} verification=block"]
    assert second == [
        "target alone",
        ONE.name,
        TWO.name,
    ]  # rounds of one serve the costs, but not under block verification
    assert [(name, prompts) for name, _, prompts in log.sweeps] == [
        ("generations", "prompts"),
        ("generations-turn-2", "prompts"),
    ]
    assert log.chosen == [
        ("evaluation", [], 0),
        ("evaluation", first, 1),
        ("evaluation", second, 2),
    ]
    assert log.tuned == [1] and log.costs == [[ONE.name, *first], [ONE.name, *second]]
    assert [
        each.setting.name for each in outcome.measured
    ] == second and outcome.decoded_counts == dict.fromkeys(second, 1)
    assert outcome.doubts == [] and outcome.cost_table.fit is not None


def test_settings_under_block_verification_stay_while_they_are_chosen(settling):
    block = under_block([ONE])
    _, log = settling(
        [[TARGET_ALONE, ONE, *block], [TARGET_ALONE, TWO, *block], [TARGET_ALONE, TWO, *block]]
    )
    assert log.sweeps[1][1] == ["target alone", ONE.name, block[0].name, TWO.name]


def test_doubts_end_the_turns_and_steps_are_timed(settling):
    """With dev prompts of enough groups; otherwise the rounds have to do."""
    for groups, by_steps in ((8, True), (7, False)):
        outcome, log = settling(
            [[TARGET_ALONE, ONE], [TARGET_ALONE, TWO]], doubts=[["Busy."]], groups=groups
        )
        if by_steps:
            outcome, setup, tuning = outcome
            assert (setup, tuning) == (log.setup, "tuning")
        assert outcome.doubts == ["Busy."] and len(log.sweeps) == 1


def test_without_costs_of_rounds_there_is_no_doubt(settling):
    outcome, log = settling([[ONE], [ONE]], doubts=[["Busy."]], fit=False)
    assert outcome.doubts == [] and len(log.sweeps) == 1


def test_costs_that_do_not_settle_are_a_doubt(settling, caplog):
    caplog.set_level(logging.INFO)
    (outcome, *_), log = settling([[each] for each in (ONE, TWO, THREE, FOUR, FIVE)])
    said = (
        f"The measured costs did not settle, so {FIVE.name} were not decoded; live figures need a"
        " quiet machine."
    )
    assert outcome.doubts == [said] and len(log.sweeps) == 4
    assert log.sweeps[-1][:2] == ("generations-turn-4", [ONE.name, TWO.name, THREE.name, FOUR.name])
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"at the costs of these rounds other rules are best: {each.name}"
        for each in (TWO, THREE, FOUR)
    ]
    (outcome, *_), _ = settling([[each] for each in (ONE, TWO, THREE, FOUR)] + [[FIVE, SIX]])
    assert f"so {FIVE.name}, {SIX.name} were" in outcome.doubts[0]


def test_the_chosen_settings_are_those_that_were_decoded(monkeypatch):
    asked = []
    monkeypatch.setattr(
        decode,
        "best_of_kinds",
        lambda outcome, decoded: asked.append((outcome, dict(decoded))) or [ONE, TWO],
    )
    older = replace(TWO, arguments={"num_tokens": 22})
    how: Any = SimpleNamespace(tries_block=False)
    assert decode._chosen_settings(how, "outcome", {TWO.name: older}) == [TARGET_ALONE, ONE, older]
    found = decode._chosen_settings(SimpleNamespace(tries_block=True), "outcome", {})
    assert found[:3] == [TARGET_ALONE, ONE, TWO] and [each.name for each in found[3:]] == [
        f"{each.name} verification=block" for each in (ONE, TWO)
    ]
    assert asked == [("outcome", {TWO.name: older}), ("outcome", {})]


def test_counts_of_what_was_decoded_are_of_the_reported_prompts_and_stay():
    sets: Any = [
        SimpleNamespace(counts=[f"{role} {number}" for number in range(4)])
        for role in ("dev", "test")
    ]
    rules = [ONE, TWO, replace(THREE, ratio=MEASURED), replace(FOUR, ratio="10")]
    outcome = Outcome(
        rules, CostTable({}), sets, decoded_counts={TWO.name: "earlier", "gone": "kept"}
    )
    found = decoded_counts(outcome, [TARGET_ALONE, TWO, THREE, FOUR])
    assert found == {TWO.name: "earlier", THREE.name: "test 2", "gone": "kept"}
    with pytest.raises(ValueError, match="argument"):  # counts of other candidates
        decoded_counts(replace(outcome, candidates=rules[1:]), [TWO])


@dataclass(frozen=True)
class Fits:
    """What stands for a tuning."""

    cost_table: Any


def test_rules_for_the_measured_costs_are_fitted_and_replayed_again(monkeypatch):
    """At their places, on all sets.

    Nothing else is replayed, and the earlier counts stay where they were.
    """
    asked = []
    roles = ("dev", "test")
    again = [
        ONE,
        replace(TWO, ratio=MEASURED, name="again"),
        THREE,
        replace(FOUR, ratio=MEASURED, name="too"),
    ]

    def replayed(sets, rules):
        return [
            replace(each, counts=[f"{each.name} {rule.name}" for rule in rules]) for each in sets
        ]

    monkeypatch.setattr(decode, "candidates", lambda *values: asked.append(values) or again)
    monkeypatch.setattr(decode, "replay_all", replayed)
    sets: Any = [
        RecordedSet(role, role, None, [0], [f"{role} {number}" for number in range(4)])
        for role in roles
    ]
    setup: Any = SimpleNamespace(rules="rules", heads="heads")
    outcome = Outcome([ONE, TWO, THREE, FOUR], "table", sets)
    tuning = Fits("older")
    tuned = decode._tuned_again(setup, outcome, tuning)
    assert asked == [("rules", "heads", Fits("table"))]
    assert tuned.candidates == [ONE, again[1], THREE, again[3]] and outcome.candidates == [
        ONE,
        TWO,
        THREE,
        FOUR,
    ]
    assert [each.counts for each in tuned.sets] == [
        [f"{role} 0", f"{role} again", f"{role} 2", f"{role} too"] for role in roles
    ]
    assert [each.counts for each in outcome.sets] == [
        [f"{role} {number}" for number in range(4)] for role in roles
    ]
    again[1] = TWO
    again[3] = replace(FOUR, ratio="10")
    assert decode._tuned_again(setup, outcome, tuning) is outcome


@dataclass(frozen=True)
class Stepped(Outcome):
    """An outcome whose choices are those of its cost table."""

    @property
    def choices(self):
        return self.cost_table.choices

    def chosen(self):
        return replace(self, best="chosen")


@pytest.fixture
def stepping(monkeypatch):
    """Settle by timed steps at these ratios, which agree on a choice or do not.

    Returns the outcome, and what was timed.
    """

    def run(*ratios, agree=True, window=99):
        log = SimpleNamespace(timed=[], tuned=[])
        choices = ["a", "a", "a"] if agree else ["a", "a", "b"]

        def timed(decoder, rules, context, seconds, is_enough):
            ends = [StepTimes(StepCosts(1.0, ratio)) for ratio in ratios]
            log.timed.append((decoder, rules, context, seconds, is_enough(ends)))
            return ends

        def tuned(setup, outcome, tuning):
            log.tuned.append((setup, tuning))
            return outcome

        monkeypatch.setattr(decode, "_decoder", lambda setup: setup.pair)
        monkeypatch.setattr(decode, "step_time_ends", timed)
        monkeypatch.setattr(decode, "counted_ratios", lambda pair: {"pair": (4.0, 9.0)}[pair])
        monkeypatch.setattr(decode, "_tuned_again", tuned)
        monkeypatch.setattr(
            decode,
            "with_measured",
            lambda *given, ends: SimpleNamespace(choices=choices, given=given, ends=list(ends)),
        )
        setup: Any = SimpleNamespace(
            pair="pair", window=window, counted_costs=lambda: "counted", head_sizes={"small": 0.25}
        )
        measured = [
            Measured(each)
            for each in (TARGET_ALONE, TWO, LOGISTIC, headed("a"), under_block([headed("b")])[0])
        ]
        outcome = decode.settle_by_steps(
            setup, Stepped([], CostTable({}), measured=measured), "tuning"
        )
        assert log.tuned == [(setup, "tuning")] and outcome.best == "chosen"
        assert outcome.cost_table.given == ("counted", measured, {"small": 0.25})
        return outcome, log.timed

    return run


def test_rules_are_timed_until_the_ends_of_the_costs_agree(stepping):
    for agree in (True, False):
        outcome, ((decoder, rules, context, seconds, enough),) = stepping(
            7.0, 6.0, 5.0, agree=agree
        )
        assert (
            decoder == "pair"
            and list(rules) == ["MaxProbability", "HeadThreshold of small"]
            and enough == agree
        )
        assert (context, seconds) == (49, 60.0) and not outcome.counted
        assert [each.costs.ratio for each in outcome.cost_table.ends] == [7.0, 6.0, 5.0]
    assert stepping(7.0, 6.0, 5.0, window=9999)[1][0][2] == 256


def test_costs_are_counted_where_steps_tell_little_and_the_choice_is_open(stepping):
    """From a quarter of the ratio to either side.

    The range of counted ratios has its geometric mean in the middle.
    """
    assert (
        not stepping(7.5, 6.0, 4.5, agree=False)[0].counted
        and not stepping(8.0, 6.0, 4.0, agree=True)[0].counted
    )
    outcome, _ = stepping(7.75, 6.0, 4.5, agree=False)
    assert outcome.counted
    for end, ratio in zip(outcome.cost_table.ends, (9.0, 6.0, 4.0), strict=True):
        step = pytest.approx(6.0 / ratio)
        assert end.costs == StepCosts(step, 6.0)  # the target's step is that of the middle
        free = RuleCosts(0.0)
        head = RuleCosts(pytest.approx(0.25 * 6.0 / ratio))
        assert end.rules == {
            "FixedLength": free,
            "MaxProbability": free,
            "HeadThreshold of small": head,
        }


def prompt(number, group):
    return Prompt(f"{number:04x}", "dev", "", group=group), [number]


@pytest.fixture
def trial(monkeypatch):
    """A trial on dev prompts of `groups` files, two of each, every other one slower.

    What it decodes is kept.
    """

    def run(groups=8, num_live=20, lossless=True):
        log = []

        def swept(setup, name, settings, prompts):
            assert setup.settings.num_live_prompts == num_live
            log.append((name, [each.name for each in settings], [ids[0] for _, ids in prompts]))
            stats = [DecodeStats(10, 0, 0, 0, 1, 0, 3.0 + ids[0] % 2, 1.0) for _, ids in prompts]
            return [Measured(each, stats) for each in settings]

        monkeypatch.setattr(decode, "sweep", swept)
        dev = PromptSet(
            "dev", "dev", [prompt(number, f"group {number // 2}") for number in range(2 * groups)]
        )
        verification = TokenVerification() if lossless else papers.BiasedVerification(0.5)
        settings: Any = SimpleNamespace(num_live_prompts=num_live, verification=verification)
        setup: Any = SimpleNamespace(settings=settings, prompts=SimpleNamespace(dev=dev))
        outcome = Outcome([], CostTable({}), measured=[Measured(TARGET_ALONE), Measured(ONE)])
        return tried_on_dev(setup, outcome), log

    return run


def test_what_was_decoded_is_tried_on_dev_prompts_of_as_many_groups_as_there_are(trial):
    tried, ((name, settings, prompts),) = trial()
    assert (
        name == "dev-trial"
        and settings == ["target alone", ONE.name]
        and sorted(prompts) == sorted([*range(0, 16, 2), 1, 3])
    )
    assert set(tried) == set(settings) and tried[ONE.name].shape == (2001,)
    assert (
        tried[ONE.name][0] == pytest.approx(100 / (8 * 2 + 2 * 3)) and np.ptp(tried[ONE.name]) > 0
    )
    assert [len(trial(groups=20, num_live=count)[1][0][2]) for count in (2, 19, 20, 99)] == [
        8,
        9,
        10,
        40,
    ]
    assert trial(lossless=False)[1][0][1] == ["target alone"]


def test_prompts_of_a_group_are_resampled_together_in_a_trial(trial):
    """Eight files with a prompt each and two of them with a second one: a slow prompt never comes
    without its neighbour.
    """
    tried, _ = trial()
    seconds = (
        10 / tried["target alone"]
    )  # per prompt: 2 of the first, 3 of the second prompt of a file
    assert seconds.max() <= 2.5 + 1e-9  # where the two files with both prompts alone were drawn


def test_dev_prompts_of_few_groups_choose_nothing(trial, caplog):
    tried, log = trial(groups=7)
    assert tried == {} and log == []
    said = (
        "dev prompts of 7 independent texts are too few to choose a setting by; give more of them"
        " (data.num_dev)"
    )
    assert said in caplog.text


@pytest.fixture
def few(monkeypatch):
    """The settings that decode a few dev prompts, with heads of these sizes."""

    def run(**sizes):
        asked = []
        monkeypatch.setattr(decode, "sweep", lambda *values: asked.append(values) or "measured")
        dev = SimpleNamespace(first=lambda count: SimpleNamespace(prompts=f"{count} prompts"))
        heads = {name: HEADS[name] for name in sizes}
        setup: Any = SimpleNamespace(
            heads=heads, head_sizes=sizes, prompts=SimpleNamespace(dev=dev)
        )
        assert decode.decode_few(setup) == "measured"
        ((given, name, settings, prompts),) = asked
        assert given is setup and (name, prompts) == ("costs", "4 prompts")
        return settings

    return run


def test_a_few_prompts_are_decoded_with_lengths_and_the_smallest_and_largest_head(few):
    settings = few(middle=0.2, large=0.5, small=0.1)
    lengths = ["target alone", *(f"fixed_length(num_tokens={k})" for k in (1, 4, 12))]
    assert [each.name for each in settings] == [*lengths, "head small", "head large"]
    small, large = settings[-2:]
    assert (
        small.live is small.rule
        and small.live.threshold == 0.5
        and small.live.head is HEADS["small"]
    )
    assert (
        large.live.head is HEADS["large"]
        and large.head == "large"
        and large.parameters == {"threshold": 0.5}
    )
    assert large.family == large.rule_name == "head_threshold"
    assert [each.name for each in few(middle=0.2)][4:] == ["head middle"] and len(few()) == 4


@pytest.fixture
def sharing(monkeypatch, tmp_path):
    """The shares that timed steps give, with what was timed and written.

    `known` are those of an interrupted run.
    """

    def run(settings, drafting=None, window=99, **known):
        timed = []
        written = []

        def step_times(decoder, rules, context, verified, patience):
            timed.append((decoder, rules, context, verified, patience))
            return StepTimes(
                StepCosts(2.0, 9.0),
                {kind: RuleCosts(0.5 * (1 + place)) for place, kind in enumerate(rules)},
            )

        monkeypatch.setattr(decode, "_decoder", lambda setup: setup.window)
        monkeypatch.setattr(decode, "step_times", step_times)
        monkeypatch.setattr(
            decode, "write_json", lambda path, content: written.append((path, dict(content)))
        )
        how = SimpleNamespace(drafting=drafting or Autoregressive())
        setup: Any = SimpleNamespace(
            settings=how, step_shares=known, window=window, run_folder=tmp_path
        )
        return decode._timed_shares(setup, [Measured(each) for each in settings]), timed, written

    return run


def test_what_rules_add_to_a_draft_step_is_timed_once_by_itself(sharing, tmp_path):
    head = headed("a")
    block = under_block([LOGISTIC])[0]
    shares, timed, written = sharing(
        [TARGET_ALONE, replace(TWO, rule_name="fixed_length"), LOGISTIC, head, headed("b"), block]
    )
    ((window, rules, *how),) = timed
    assert (
        window == 99
        and list(rules) == ["MaxProbability", "HeadThreshold of small"]
        and how == [49, (), 3.0]
    )
    assert rules["MaxProbability"] is LOGISTIC.live
    found = {"MaxProbability": 0.25, "HeadThreshold of small": 0.5}
    assert shares == found | {"MaxProbability under block verification": 0.25}
    assert written == [(tmp_path / "step-shares.json", found)]
    shares, timed, written = sharing([LOGISTIC, head], MaxProbability=0.75, window=9999)
    assert shares == {"MaxProbability": 0.75, "HeadThreshold of small": 0.25} and list(
        timed[0][1]
    ) == ["HeadThreshold of small"]
    assert timed[0][2] == 256 and written[0][1] == shares
    assert sharing([LOGISTIC], MaxProbability=0.75)[1:] == ([], [])
    assert sharing([TARGET_ALONE, TWO]) == ({}, [], []) and sharing([LOGISTIC], papers.Tree(2)) == (
        {},
        [],
        [],
    )


def test_costs_are_fitted_with_the_shares_of_timed_steps(monkeypatch):
    monkeypatch.setattr(
        decode, "_timed_shares", lambda setup, measured: (setup, measured, "shares")
    )
    monkeypatch.setattr(decode, "with_measured", lambda *values: values)
    setup: Any = SimpleNamespace(counted_costs=lambda: "counted", head_sizes="sizes")
    assert decode.measured_costs(setup, "measured") == (
        "counted",
        "measured",
        "sizes",
        (setup, "measured", "shares"),
    )


def test_steps_are_timed_with_the_decoder_of_the_evaluation(monkeypatch):
    monkeypatch.setattr(decode, "SpeculativeDecoder", lambda *values, **named: (values, named))
    how = SimpleNamespace(warp="warp", engine="engine")
    made: Any = decode._decoder(SimpleNamespace(pair="pair", settings=how, window=7))
    assert made == (("pair",), {"warp": "warp", "engine": "engine", "window": 7})


def test_a_sweep_is_kept_in_the_journal_of_its_settings(monkeypatch):
    shown = []
    ran = []

    @contextmanager
    def progress(name, total):
        shown.append((name, total))
        yield "advance"

    monkeypatch.setattr(decode, "progress", progress)
    monkeypatch.setattr(
        Sweep, "run", lambda sweep, *values: ran.append((sweep, *values)) or "measured"
    )
    how = Evaluation(repeats=3, max_new_tokens=7)
    prompts = [prompt(4, "a"), prompt(5, "b")]
    setup: Any = SimpleNamespace(settings=how, pair="pair", window=9, run_folder="run")
    setup.journal = lambda *values, **more: (values, more)
    settings = [TARGET_ALONE, *under_block([ONE])]
    assert decode.sweep(setup, "name", settings, prompts) == "measured"
    names = [
        ("target alone", "None"),
        (settings[1].name, repr(settings[1].verification.compile_key)),
    ]
    kept = ("name", prompts), {"settings": names}
    assert ran == [(Sweep("pair", how, 9), settings, [[4], [5]], kept, "advance")] and shown == [
        ("decoding", 12)
    ]
