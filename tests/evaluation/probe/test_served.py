"""Costs of vLLM's rounds by a trial of it."""

import json
from functools import partial

import pytest
from evaluation.probe.test_prediction import RULES

from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.vllm_runner import model_of
from specheads.decoding.responses import ResponseLimits
from specheads.decoding.step_costs import RuleCosts
from specheads.decoding.step_times import StepTimes, step_costs
from specheads.errors import UserError
from specheads.evaluation.probe import served
from specheads.evaluation.probe.prediction import HEAD, LOGISTIC
from specheads.evaluation.probe.served import ALONE, SERVED, Server, Trial, served_rounds
from specheads.pair.sampling import Warp

HERE = StepTimes(
    step_costs(1.0, {0: 1.0}, {}), {**RULES, f"{HEAD}8": RuleCosts(0.02), LOGISTIC: RuleCosts(0.01)}
)


def trial(at_once=4, watched=True, step=2.0, first=3.0, verified=lambda length: 20 + length):
    """Rounds of two lengths of time, around what is given.

    A head takes 0.5 for each step and 0.8 for each round.
    """
    drafting = {(length, False): first + step * length if length else 2.5 for length in SERVED}
    if watched:
        drafting |= {(length, True): first + 0.8 + (step + 0.5) * length for length in SERVED[1:]}
    seconds = {way: taken + verified(way[0]) for way, taken in drafting.items()} | {ALONE: 18.0}
    drafting[ALONE] = 0.0
    rounds = {way: {"seconds": [0.9 * each, each, 1.1 * each]} for way, each in seconds.items()}
    for way, each in rounds.items():
        each |= {"drafting": [drafting[way]] * 3, "tokens": [5, 6, 7], "requests": [at_once] * 3}
    return Trial(at_once, 8, rounds)


def test_times_are_those_of_vllm_for_each_request():
    times = trial().times(HERE)
    costs = times.costs
    assert (
        costs.draft_seconds == pytest.approx(2 / 4)
        and costs.round_seconds == pytest.approx(3 / 4)
        and costs.at_once == 4
    )
    assert costs.verification[16] == pytest.approx((20 + 16) / 4)
    # A round without drafted tokens costs what it took.
    assert costs.verification[0] + costs.round_seconds == pytest.approx((20 + 2.5) / 4)
    assert times.rules[LOGISTIC].step_seconds == pytest.approx(0.01 / 4)
    narrow, wide = (times.rules[f"{HEAD}{width}"] for width in (8, 64))
    assert narrow.step_seconds == pytest.approx(0.5 / 4) and narrow.round_seconds == pytest.approx(
        0.8 / 4
    )
    assert wide.step_seconds == pytest.approx((0.5 + 0.05 - 0.02) / 4)  # as much more as here


def test_without_a_head_in_vllm_heads_cost_what_they_cost_here():
    rules = trial(watched=False, at_once=2).times(HERE).rules
    assert rules[f"{HEAD}64"] == RuleCosts(0.05 / 2)


def test_what_was_decoded_is_compared_with_the_nearest_length():
    made = trial()
    check = made.check(5, made.times(HERE))
    assert check.length == 4 and check.what == "vLLM, 4 at once"
    assert check.speedup == pytest.approx(18 / (3 + 8 + 20 + 4))
    # The target alone takes less than a verification of nothing.
    assert made.times(HERE).costs.target_seconds + check.overheads.alone_seconds == pytest.approx(
        18 / 4
    )


def test_a_trial_asks_vllm_twice(nano, tmp_path, monkeypatch):
    asked = []

    def lines(python, content, log):
        asked.append((python, json.loads(json.dumps(content)), log))
        given = content["ways"]
        for way in given:
            numbers = {"seconds": [1.0], "drafting": [0.5], "tokens": [1], "requests": [1]}
            yield {"way": way, "last": way == given[-1], **numbers}
        raise UserError("it was asked for more than there is")

    monkeypatch.setattr(served, "lines_of", lines)
    warp = Warp(0.0)
    limits = ResponseLimits(max_new_tokens=12)
    server = Server(
        "python9", partial(model_of, settings=DataGeneration(vllm_options={"dtype": "float16"}))
    )
    made = served_rounds(nano, [[1, 2, 3], [4]], warp, limits, 2, 16, server, tmp_path)
    (python, drafting, log), (_, alone, _) = asked
    assert python == "python9" and log.parent == tmp_path
    assert [tuple(way) for way in drafting["ways"]] == list(made.rounds)[:-1] and alone["ways"] == [
        [None, False]
    ]
    model = drafting["model"]
    assert (
        model["max_num_seqs"] == 2
        and model["dtype"] == "float16"
        and model["max_model_len"] == 3 + 12 + max(SERVED)
    )
    assert (
        model["speculative_config"]["num_speculative_tokens"] == max(SERVED)
        and "speculative_config" not in alone["model"]
    )
    assert drafting["requests"][1]["params"]["temperature"] == 0 and drafting["requests"][1][
        "ids"
    ] == [4]


def test_several_processes_are_refused(nano, tmp_path):
    server = Server(
        "python9",
        partial(model_of, settings=DataGeneration(vllm_options={"tensor_parallel_size": 2})),
    )
    with pytest.raises(
        UserError,
        match=(
            "inside one process of vLLM, but vllm.options has tensor_parallel_size=2; leave it out"
        ),
    ):
        served_rounds(
            nano, [[1, 2, 3]], Warp(0.0), ResponseLimits(max_new_tokens=12), 1, 16, server, tmp_path
        )
