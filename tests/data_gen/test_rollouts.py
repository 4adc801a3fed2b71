"""Rollouts hold the tokens that the draft proposes after its own tokens, and how token verification accepts them."""

import bisect
import itertools

import numpy as np
import pytest
import torch
from fakes import tiny_pair
from statistics_helper import chi_square_p_value

from data_gen.rollouts import roll_out, rollout_uniforms
from data_gen.rows import Shard, label_rows, respond
from data_gen.settings import Generation
from specheads.decoding.responses import Responder
from specheads.errors import UserError
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt

WARPS = [Warp(0), Warp(1.0), Warp(0.7, top_k=5)]
LENGTHS = [(3, 9), (11, 1), (1, 14), (6, 6), (2, 2), (9, 11)]  # of prompt and response, in no order
MOST = 16  # tokens of a response


def texts(vocab_size=12, seed=0):
    generator = np.random.default_rng(seed)
    return tuple([generator.integers(1, vocab_size, size=pair[i]).tolist() for pair in LENGTHS] for i in (0, 1))


def uniforms(rows=6, count=3, width=5, seed=1):
    return np.random.default_rng(seed).random((rows, count, 1 + width))


def stopping_pair(stop=0, **kwargs):
    pair = tiny_pair(12, **kwargs)
    pair.target.generation_config.eos_token_id = stop
    return pair


def distribution(model, text, warp):
    return warp(model(torch.tensor([text]), use_cache=False).logits[0, -1])


def reference(pair, prompt, response, numbers, warp, limit):
    """Return one rollout by its definition: its start, its tokens and the draft's distributions, by a pass per token."""
    start = int(numbers[0] * min(len(response), limit - 1))
    ids, distributions = [], []
    for draw in numbers[1:]:
        if start + len(ids) >= limit - 1 or (ids and ids[-1] in pair.stop_tokens):
            break
        text = [*prompt, *response[:start], *ids]
        distributions.append((distribution(pair.draft, text, warp), distribution(pair.target, text, warp)))
        ids.append(bisect.bisect_right(list(itertools.accumulate(distributions[-1][0].tolist())), draw))
    return start, ids, distributions


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("batch_size", [3, 7, 64])
def test_rollouts_equal_their_definition(warp, batch_size):
    pair, (prompts, responses), numbers = stopping_pair(scale=2.0), texts(), uniforms()
    made = roll_out(pair, prompts, responses, numbers, warp, MOST, batch_size)
    accepted = []
    for row, rollouts in enumerate(made):
        assert len(rollouts.rollout_start) == 3
        for number in range(3):
            start, ids, distributions = reference(pair, prompts[row], responses[row], numbers[row, number], warp, MOST)
            assert (rollouts.rollout_start[number], rollouts.rollout_ids[number]) == (start, ids)
            expected = [min(1.0, float(t[token] / d[token])) for token, (d, t) in zip(ids, distributions, strict=True)]
            assert rollouts.rollout_accept_prob[number] == pytest.approx(expected, abs=1e-10)
            accepted += expected
    assert min(accepted) < 0.5 and max(accepted) == 1  # both outcomes occur


def test_rollouts_begin_at_every_position_of_the_response():
    pair, (prompts, responses) = stopping_pair(), texts()
    spread = np.linspace(0, 1, 40, endpoint=False)
    numbers = np.broadcast_to(np.stack([spread, *uniforms(2, 40, 0)[:, :, 0]], axis=1), (6, 40, 3))
    for response, rollouts in zip(responses, roll_out(pair, prompts, responses, numbers, Warp(1.0), MOST, 64), strict=True):
        assert set(rollouts.rollout_start) == set(range(len(response)))


def test_a_rollout_ends_at_an_end_token_or_before_the_limit():
    pair, (prompts, responses), numbers = stopping_pair(scale=0.5), texts(), uniforms(count=20, width=6)
    made = roll_out(pair, prompts, responses, numbers, Warp(1.0), MOST, 64)
    ends = {"stop": 0, "limit": 0, "length": 0}
    for rollouts in made:
        for start, ids in zip(rollouts.rollout_start, rollouts.rollout_ids, strict=True):
            assert 0 not in ids[:-1] and 1 <= len(ids) <= min(6, MOST - 1 - start)
            ends["stop" if ids[-1] == 0 else "length" if len(ids) == 6 else "limit"] += 1
            assert ids[-1] == 0 or len(ids) == min(6, MOST - 1 - start)
    assert all(ends.values())  # each end did occur


def test_a_response_at_its_limit_has_no_rollouts():
    pair, (prompts, responses) = stopping_pair(), texts()
    made = roll_out(pair, prompts, [response[:1] for response in responses], uniforms(), Warp(1.0), 1, 64)
    assert all(list(vars(rollouts).values()) == [[]] * 3 for rollouts in made)
    assert roll_out(pair, prompts, responses, uniforms(count=0), Warp(1.0), MOST, 64)[0].rollout_ids == []


def test_rollouts_follow_the_drafts_distribution():
    # Fixed numbers; for new ones each of the two comparisons fails by chance once in a million.
    pair, warp, count = tiny_pair(8), Warp(0.9, top_k=6), 8192
    prompt, response, numbers = [3, 1], [4, 2, 5], uniforms(1, count, 2, seed=5)
    numbers[:, :, 0] = 0.4  # after the first token of the response
    (made,) = roll_out(pair, [prompt], [response], numbers, warp, MOST, 512)
    first = distribution(pair.draft, [3, 1, 4], warp)
    counts = torch.zeros(8, 8)
    for token, following in made.rollout_ids:
        counts[token, following] += 1
    assert chi_square_p_value(counts.sum(1).long(), first) > 1e-6
    joint = torch.stack([first[token] * distribution(pair.draft, [3, 1, 4, token], warp) for token in range(8)])
    assert chi_square_p_value(counts.flatten().long(), joint.flatten()) > 1e-6


def rows_of(chosen=slice(None), batch_size=64, warp=Warp(1.0, top_k=6), **settings):  # noqa: B008
    prompts = [(Prompt(f"{i:04x}", "train", str(i)), ids) for i, ids in enumerate(texts()[0])][chosen]
    changed = {"rollouts_per_response": 3} | settings
    settings = Generation(seed=7, warp=warp, max_new_tokens=16, batch_size=batch_size, **changed)
    responder, shard = Responder(stopping_pair(), [len(ids) for _, ids in prompts], settings.limits), Shard(prompts)
    return label_rows(responder.pair, shard, respond(responder, shard, settings), settings)


def test_rollouts_do_not_depend_on_neighbours_and_leave_the_rest_of_the_row_as_it_is():
    together, without, more = rows_of(), rows_of(rollouts_per_response=0), rows_of(rollouts_per_response=5)
    for number, row in enumerate(together):
        (alone,) = rows_of(slice(number, number + 1), batch_size=2)
        for name, value in row.items():
            if not name.startswith("rollout"):
                assert value == without[number][name]
            elif name.endswith(("start", "ids")):
                assert value == alone[name] == more[number][name][:3]
            else:
                for first, other in zip(value, alone[name], strict=True):
                    assert first == pytest.approx(other, abs=1e-10)
        assert all(without[number][name] == [] for name in row if name.startswith("rollout"))
    starts = {tuple(row["rollout_start"]) for row in together}
    assert len(starts) >= 4  # rows have different numbers


def test_rollouts_have_different_uniform_numbers():
    made = [rollout_uniforms(*key, 4, 8) for key in [(0, "ab", 0), (1, "ab", 0), (0, "ac", 0), (0, "ab", 1)]]
    assert len({tuple(numbers.flatten()) for numbers in made}) == 4
    np.testing.assert_array_equal(rollout_uniforms(0, "ab", 0, 2, 8), made[0][:2])


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_a_model_that_gives_nan_is_named(broken):
    pair = tiny_pair(5)
    getattr(pair, broken).get_output_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match=f"tiny-{broken} produced NaN"):
        roll_out(pair, [[1]], [[2]], uniforms(1, 1), Warp(), MOST, 4)


@pytest.mark.parametrize("value", [-1, 0.5])
def test_the_number_of_rollouts_may_be_zero_but_not_less(value):
    with pytest.raises(UserError, match=f"generation.rollouts_per_response={value} must be a non-negative integer"):
        Generation(rollouts_per_response=value)
    assert Generation(rollouts_per_response=0).rollouts_per_response == 0
