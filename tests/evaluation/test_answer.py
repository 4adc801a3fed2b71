"""Which setting is to be used, and that every place which names one names the same."""

import json
import re
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from simulated_evaluations import BUSY, MAX_TOKENS, QUIET, Population, Simulation

from specheads import UserError
from specheads.commands import export
from specheads.commands.runs import print_runs
from specheads.decoding.decoder import recommended_rules
from specheads.evaluation.answer import answer_of, fastest_by_kind, setting_to_use, winners_at
from specheads.evaluation.candidates import FIXED
from specheads.evaluation.conclusions import evidence_text
from specheads.evaluation.keys import MEASURED, Kind
from specheads.evaluation.presentation import print_report, write_report
from specheads.evaluation.recommendations import recommendations, store_recommendations
from specheads.evaluation.report import (
    ComparedSetting,
    DataSet,
    Evidence,
    LiveRow,
    Report,
    Winner,
)
from specheads.heads.head import LocatedHead, load_head, save_head
from specheads.replay.intervals import Interval

COUNT = 101


def kinds_of(names):
    """The kinds of settings that are called by their kind."""
    first = {"target": Kind.ALONE, "fixed": Kind.FIXED, "rule": Kind.HEADLESS, "head": Kind.HEAD}
    return {name: first[name.split()[0]] for name in names}


def wave(speed, size, pace):
    """Resampled speed-ups around an estimate, which comes first."""
    return speed * (1 + size * np.sin(pace * np.arange(COUNT)))


def used(tried):
    return setting_to_use(tried, kinds_of(tried))


@pytest.mark.parametrize(
    ("gain", "name"), [(1.2, "fixed 2"), (1.01, "target alone"), (0.9, "target alone")]
)
def test_a_setting_that_is_not_clearly_faster_leaves_the_target_alone(gain, name):
    alone = wave(100, 0.02, 1)
    fixed = gain * alone * wave(1, 0.05, 2)
    assert used({"target alone": alone, "fixed 2": fixed}) == name


@pytest.mark.parametrize(
    ("simple", "complex_one"), [("fixed", "rule"), ("fixed", "head"), ("rule", "head")]
)
@pytest.mark.parametrize(("gain", "is_clear"), [(1.1, True), (1.01, False), (0.9, False)])
def test_a_tie_is_for_the_simpler_setting(simple, complex_one, gain, is_clear):
    simpler = wave(140, 0.02, 1)
    tried = {
        "target alone": np.full(COUNT, 100.0),
        simple: simpler,
        complex_one: gain * simpler * wave(1, 0.05, 2),
    }
    assert used(tried) == (complex_one if is_clear else simple)


def test_a_rule_that_ties_with_a_head_is_used_although_it_ties_with_the_fixed_length_too():
    """The head is clearly faster than the fixed length, which therefore is none of the fastest."""
    fixed = np.full(COUNT, 1.4)
    rule = wave(1.46, 0.08, 2)
    head = fixed * wave(1.06, 0.01, 3)
    tried = {"target alone": np.ones(COUNT), "fixed": fixed, "rule": rule}
    assert used(tried) == "fixed"
    assert used(tried | {"head": head}) == "rule"


@pytest.mark.parametrize(("count", "name"), [(1, "head 0"), (30, "rule")])
def test_the_best_of_many_heads_must_be_faster_than_chance_makes_the_best_of_so_many(count, name):
    """Two standard errors are clear for one head, and nothing for the best of thirty."""
    rng = np.random.default_rng(0)
    tried = {"target alone": np.ones(2001), "rule": np.full(2001, 1.5)}
    for number in range(count):
        gain = 1.02 if number == 0 else 1.0
        noise = 0.01 * np.concatenate([[0], rng.standard_normal(2000)])
        tried[f"head {number}"] = 1.5 * gain * (1 + noise)
    assert used(tried) == name


@pytest.mark.parametrize("place", [1, -1])
@pytest.mark.parametrize(("num_resamples", "name"), [(19, "target alone"), (20, "fixed")])
def test_at_most_one_of_twenty_resamples_may_doubt_what_is_clearly_faster(
    num_resamples, name, place
):
    fixed = np.full(1 + num_resamples, 2.0)
    fixed[place] = 4.0  # as far above the estimate as that is above the target alone
    assert used({"target alone": np.ones(1 + num_resamples), "fixed": fixed}) == name


def test_the_estimate_chooses_and_no_resample():
    tried = {
        "target alone": np.array([1, 1, 1, 1.0]),
        "rule best": np.array([1.5, 1.49, 1.5, 1.51]),
        "rule lucky": np.array([1.4, 9, 1.3, 1.5]),
    }
    assert used(tried) == "rule best"
    head = {"head": np.array([1.6, 1.59, 1.6, 1.61])}
    assert used(tried | head) == "head"  # not compared with a lucky one


def about(value, width=0.02):
    return Interval(value, value - width, value + width)


def winner(family, here, on_dev, head=None, **values):
    """The best rule of a family at ratio 10, with its speeds on the reported and on dev prompts."""
    speedup = about(here, 0.1)
    gain = about(1.02, 0.01)
    return Winner(
        family, family, "10", speedup, gain, None, on_dev, head=head, rule_name=family, **values
    )


def test_winners_are_in_the_order_of_what_is_shown_and_bounds_last():
    rows = [
        winner("slow", 1.1, 1.4),
        winner("fast", 1.9, 1.2),
        winner("ceiling", 3.0, 2.9, bound=True),
        replace(winner("elsewhere", 1.5, 1.5), ratio="5"),
    ]
    found = winners_at(DataSet("set", "test", 7, 1, 1, [], rows), "10")
    assert [row.name for row in found] == ["fast", "slow", "ceiling"]


def decoded(name, family, speed, gain=1.0, over_headless=None, **values):
    """A setting that was decoded, with what it gains over the best simpler ones."""
    one = Interval(1, 1, 1)
    speedup = about(speed, 0.1)
    given = {"head": "mine" if family == "head_threshold" else None, "rule_name": family}
    given |= {"gain": about(gain), "over_headless": over_headless and about(over_headless)}
    given |= values
    return LiveRow(name, family, speedup, speedup, one, one, 1.0, None, {}, None, True, **given)


def test_who_was_lucky_on_the_reported_prompts_is_not_the_fastest():
    """Of each kind the fastest on dev prompts, in their order.

    Neither bounds nor what changes the distribution.
    """
    rows = [
        winner(FIXED, 1.9, 1.2),
        winner(FIXED, 1.3, 1.3),
        winner("logistic", 1.2, 1.5),
        winner("head_threshold", 1.1, 1.4, "mine"),
        winner("ceiling", 3.0, 3.0, bound=True),
    ]
    found = fastest_by_kind(rows)
    assert [(kind, row.dev_speedup) for kind, row in found.items()] == [
        (Kind.HEADLESS, 1.5),
        (Kind.HEAD, 1.4),
        (Kind.FIXED, 1.3),
    ]
    live = [decoded("lossy", "logistic", 3.0), decoded("fixed", FIXED, 1.5)]
    live[0] = replace(live[0], lossless=False)
    assert list(fastest_by_kind(live)) == [Kind.FIXED]


def report_of(rows, context=None, **values):
    sets = [DataSet("set", "test", 7, 1, 1, [], rows)]
    return Report(context or {}, None, data_sets=sets, **values)


def answer_at_ten(rows, uses=None):
    return answer_of(report_of(rows), uses or {})


def test_without_a_choice_on_dev_prompts_the_answer_is_the_fastest_there():
    rows = [winner(FIXED, 1.9, 1.2), winner("logistic", 1.1, 1.4)]
    answer = answer_at_ten(rows)
    assert answer.kind == Kind.HEADLESS
    assert list(answer.comparison.choices) == [Kind.ALONE, Kind.FIXED, Kind.HEADLESS]
    slow = [replace(row, dev_speedup=row.dev_speedup - 0.5) for row in rows]
    assert answer_at_ten(slow).kind == Kind.ALONE


def test_the_target_alone_loses_what_the_fixed_length_gains():
    rows = [replace(winner(FIXED, 1.6, 1.6), speedup=Interval(1.6, 1.25, 2.0))]
    alone = answer_at_ten(rows).comparison.choices[Kind.ALONE]
    assert alone == ComparedSetting("target alone", Interval(1, 1, 1), Interval(0.625, 0.5, 0.8))


@pytest.mark.parametrize(
    ("use", "over"),
    [("target alone", 1.6), (FIXED, 1.02), ("logistic", 1.01), ("head_threshold", None)],
)
def test_of_a_tie_the_advantage_of_the_fastest_is_over_what_is_used(use, over):
    head = winner("head_threshold", 1.6, 1.6, "mine", over_headless=about(1.01))
    rows = [winner(FIXED, 1.5, 1.5), winner("logistic", 1.55, 1.55), head]
    answer = answer_at_ten(rows, {"10": use})
    comparison = answer.comparison
    assert (answer.setting, answer.is_tie) == (use, over is not None)
    assert (comparison.over_used and comparison.over_used.value) == over
    used = comparison.choices[answer.kind]
    assert (answer.speedup, answer.gain) == (used.speedup, used.gain)


@pytest.mark.parametrize(
    ("fixed", "rule", "head", "kind"),
    [
        (1.05, (1.02, 1.0), (1.02, 1.0, 1.0), Kind.ALONE),
        (1.0, (0.8, 0.8), (1.02, 1.01, 1.25), Kind.ALONE),  # only the rule is clearly slower
        # The head is clearly faster than the target alone, and not than the fixed length
        (1.08, (0.9, 0.85), (1.12, 1.01, 1.01), Kind.FIXED),
        (1.5, (1.5, 1.0), (1.51, 1.01, 1.01), Kind.FIXED),
        (1.5, (1.5, 1.0), (1.6, 1.06, 1.06), Kind.HEAD),
        (1.5, (1.6, 1.06), (1.62, 1.08, 1.01), Kind.HEADLESS),
        (1.5, (1.6, 1.06), (1.7, 1.13, 1.06), Kind.HEAD),
    ],
)
def test_where_nothing_was_replayed_a_tie_is_for_the_simpler_too(fixed, rule, head, kind):
    live = [
        decoded("target alone", "target", 1.0),
        decoded("fixed", FIXED, fixed),
        decoded("rule", "logistic", *rule),
        decoded("head", "head_threshold", *head),
    ]
    answer = answer_of(Report({"num_live_prompts": 4}, None, live=live), {})
    assert (answer.kind, answer.comparison.ratio) == (kind, MEASURED)


NAMED = {"split": "final", "machine": "some CPU"}
UNNAMED = {"split": None, "machine": "a machine that is not named"}


@pytest.mark.parametrize(
    ("context", "names"), [({"split": "final", "device": "some CPU"}, NAMED), ({}, UNNAMED)]
)
@pytest.mark.parametrize("ratio", ["10", MEASURED])
def test_replay_rests_on_its_prompts_and_how_steps_were_charged(ratio, context, names):
    timed = Interval(5.5, 5.0, 6.0)
    report = report_of([replace(winner(FIXED, 1.5, 1.5), ratio=ratio)], context, ratio=timed)
    on_set = {"method": "replay", "prompts": "set", "num_prompts": 7, **names}
    costs = {"costs": "counted", "ratio": None}
    if ratio == MEASURED:
        costs = {"costs": "timed", "ratio": timed}
    for given, num_dev_prompts in (((), 0), ((9,), 9)):
        evidence = answer_of(report, {}, *given).evidence
        assert evidence == Evidence(**on_set, **costs, num_dev_prompts=num_dev_prompts)


@pytest.mark.parametrize(("context", "number"), [({"num_live_prompts": 4}, 4), ({}, 0)])
def test_decoding_alone_rests_on_the_prompts_that_chose_too(context, number):
    timed = Interval(5.5, 5.0, 6.0)
    live = [decoded("target alone", "target", 1.0), decoded("fixed", FIXED, 1.5)]
    assert answer_of(Report(context, None, live=live, ratio=timed), {}, 9).evidence == Evidence(
        method="decoding",
        prompts="decoded prompts",
        num_prompts=number,
        num_dev_prompts=0,
        costs="timed",
        ratio=timed,
        **UNNAMED,
    )


def test_only_with_timed_costs_decoded_rounds_say_something_of_the_setting():
    live = [decoded(FIXED, FIXED, 1.5)]
    for of, over in (("logistic", 1.2), (FIXED, 1.01), (FIXED, 1.1)):
        row = decoded(f"{of} {over}", "block", 1.6, same_rule=of, over_same_rule=about(over))
        live.append(row)
    counted = [winner(FIXED, 1.5, 1.5)]
    answer = answer_of(report_of(counted, live=live), {})
    assert answer.decoded is None and answer.under_verification is None
    timed = [replace(counted[0], ratio=MEASURED)]
    answer = answer_of(report_of(timed, live=live), {})
    assert (answer.decoded, answer.under_verification) == (live[0], live[3])
    answer = answer_of(report_of(timed, live=live[:3]), {})
    assert (answer.decoded, answer.under_verification) == (live[0], None)
    answer = answer_of(report_of(timed, live=live[1:]), {})
    assert answer.decoded is None and answer.under_verification is None


def printed(report):
    console = Console(record=True, width=200)
    print_report(report, console)
    return console.export_text()


@pytest.fixture(scope="module")
def simulations():
    """Heads that gain nothing and heads that gain; rules without a head that gain nothing."""
    few = {"lengths": (1, 2, 4, 8), "thresholds": (0.3, 0.6)}
    of = Population(250, heads=2, error=1.0, **few)
    return [Simulation(of, gain, num_prompts=(40, 60)) for gain in (0.0, 0.03, 0.08)]


def test_a_heads_folder_is_given_its_best_threshold_with_its_speed(simulations, tmp_path):
    simulation = simulations[2]
    results = simulation.results(None, np.random.default_rng(0))
    report = simulation.report(results, rules=True)
    (mine, head), (elsewhere, other) = simulation.of.heads.items()
    located = {elsewhere: LocatedHead(other, "my/head"), mine: LocatedHead(head, str(tmp_path))}
    setup = SimpleNamespace(located_heads=located)
    (best,) = [row for row in report.data_sets[0].winners if row.head == mine]
    expected = {
        "threshold": best.parameters["threshold"],
        "min_tokens": 1,
        "max_tokens": MAX_TOKENS,
        "verification": "token",
        "setting": best.name,
        "speedup": best.speedup.value,
        "speedup_low": best.speedup.low,
        "speedup_high": best.speedup.high,
        "use": report.answer.setting,
        "evidence": evidence_text(report.answer),
    }
    assert recommendations(setup, results, report) == {tmp_path: expected}
    faster = decoded("head", "block", 1.6, verification="block")
    for setting, verification in ((best.name, "block"), ("fixed", "token")):
        answer = replace(report.answer, setting=setting, under_verification=faster)
        found = recommendations(setup, results, replace(report, answer=answer))
        assert found == {tmp_path: expected | {"use": setting, "verification": verification}}
    assert recommendations(setup, results, replace(report, answer=None)) == {}


def test_of_200_simulated_evaluations_all_places_name_the_same_setting(
    simulations, tmp_path, monkeypatch, capsys
):
    """The page, the terminal, `runs`, the head's config, its card, `recommended()`, engines'
    settings and report.json.
    """
    monkeypatch.setenv("COLUMNS", "300")
    rng = np.random.default_rng(0)
    kinds = set()
    for number in range(200):
        simulation = simulations[number % 3]
        noise = {0: QUIET, 1: BUSY}.get(number % 20)  # else costs are counted
        results = simulation.results(noise, rng)
        report = simulation.report(results, rules=True)
        answer = report.answer
        name = answer.setting
        kinds.add(answer.kind)
        assert re.findall(r"^Use: (.+?) *$", printed(report), re.MULTILINE) == [name]
        write_report(report, tmp_path)
        page = (tmp_path / "report.html").read_text()
        first = re.search(r"<h2><span>Use:</span> <code>(.+?)</code>", page)[1]
        assert unescape(first) == name
        assert json.loads((tmp_path / "report.json").read_text())["answer"]["setting"] == name
        print_runs([tmp_path])
        listed = capsys.readouterr().out
        assert f"use {name}, {answer.speedup.value:.2f} times the target alone" in listed
        located = {}
        for head_name, head in simulation.of.heads.items():
            folder = tmp_path / head_name.replace(" ", "-")
            if not folder.exists():
                save_head(head, folder)
            located[head_name] = LocatedHead(head, str(folder))
        store_recommendations(SimpleNamespace(located_heads=located), results, report)
        for each in located.values():
            stored = load_head(each.where)
            assert stored.config.recommended["use"] == name
            assert f"Use {name}. " in (tmp_path / each.where / "README.md").read_text()
            assert f"Use {name}. " in export.run([f"head={each.where}"])
            if stored.config.recommended["setting"] == name:
                rule, _ = recommended_rules(stored)
                assert f"threshold={rule.threshold:g}" in name
            else:
                with pytest.raises(UserError, match=re.escape(f"recommends {name}, not")):
                    recommended_rules(stored)
        ratio = answer.comparison.ratio
        words = [f"report={tmp_path}", "format=vllm", f"ratio={ratio}"]
        if answer.kind == Kind.ALONE:
            with pytest.raises(UserError, match="serve the target without a draft"):
                export.run(words)
        else:
            text = export.run(words)
            length = answer.comparison.choices[Kind.FIXED].parameters["num_tokens"]
            assert f'"num_speculative_tokens": {length}' in text
            assert (f"recommends {name}" in text) == (answer.kind != Kind.FIXED)
    assert {Kind.FIXED, Kind.HEAD} <= kinds
