"""One decoder with many uses: whatever was done with it before, greedy output is that of a fresh
decoder.
"""

import copy
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fakes import tiny_pair
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from specheads import SpeculativeDecoder, UserError, Warp, load_pair, stopping
from specheads.decoding import batching
from specheads.decoding.decoder import Baseline, BatchError
from specheads.decoding.stopping.rule import CountingState
from specheads.pair.draft_vocabulary import keep_tokens

GREEDY = Warp(temperature=0)
LONGEST = 10
PROMPTS = [[1, 2, 3], [4], [5, 6, 0, 3]]
OPEN = "this decoder is decoding already"
prompts = st.sampled_from(PROMPTS)
lists = st.lists(prompts, min_size=1, max_size=4)


def greedy(pair, **choices):
    return SpeculativeDecoder(pair, warp=GREEDY, engine="eager", **choices)


class Right(NamedTuple):
    """What a fresh decoder makes of a prompt."""

    tokens: list
    text: str


class Stream(NamedTuple):
    """An open stream: its other pieces, what was read of it, and its whole text."""

    pieces: object
    read: str
    text: str


class Uses(RuleBasedStateMachine):
    """A decoder and at most one stream of it that is open."""

    def __init__(self):
        super().__init__()
        self.decoder = greedy(tiny_pair(7, 2.0), stopping=stopping.OnlineLogistic(max_tokens=5))
        self.stream = None
        self.known = {}

    def right(self, prompt):
        """What a fresh decoder makes of a prompt; known until weights change."""
        if tuple(prompt) not in self.known:
            out = greedy(self.decoder.pair).generate(prompt, LONGEST)
            self.known[tuple(prompt)] = Right(out.tokens.tolist(), out.text)
        return self.known[tuple(prompt)]

    def compare(self, decoder, prompt):
        if self.stream is None:
            assert decoder.generate(prompt, LONGEST).tokens.tolist() == self.right(prompt).tokens
        else:
            with pytest.raises(UserError, match=OPEN):
                decoder.generate(prompt, LONGEST)

    @rule(prompt=prompts)
    def generate(self, prompt):
        self.compare(self.decoder, prompt)

    @rule(prompt=prompts, length=st.integers(1, 6))
    def share_the_memory(self, prompt, length):
        self.compare(self.decoder.with_stopping(stopping.FixedLength(length)), prompt)

    @precondition(lambda self: self.stream is None)
    @rule(prompt=prompts)
    def open_a_stream(self, prompt):
        opened = self.decoder.stream(prompt, LONGEST)
        self.stream = Stream(opened, next(opened), self.right(prompt).text)

    @precondition(lambda self: self.stream is not None)
    @rule(whole=st.booleans())
    def end_the_stream(self, whole):
        stream = self.stream
        self.stream = None
        if whole:
            assert stream.read + "".join(stream.pieces) == stream.text
        else:
            del stream  # dropped half-way

    @rule(asked=lists, rows=st.integers(2, 3))
    def batch(self, asked, rows):
        # In memory of its own
        outs = self.decoder.generate_batch(asked, max_batch=rows, max_new_tokens=LONGEST)
        assert [out.tokens.tolist() for out in outs] == [
            self.right(prompt).tokens for prompt in asked
        ]

    @rule(
        asked=lists,
        rows=st.integers(2, 3),
        error=st.sampled_from([None, ValueError, KeyboardInterrupt]),
    )
    def leave_a_batch(self, asked, rows, error):
        with suppress(ValueError, KeyboardInterrupt):
            for number, out in self.decoder.generate_batch(
                asked, max_batch=rows, max_new_tokens=LONGEST, as_completed=True
            ):
                assert out.tokens.tolist() == self.right(asked[number]).tokens
                if error is None:
                    break
                raise error

    @precondition(lambda self: self.stream is None)
    @rule(prompt=prompts, error=st.sampled_from([RuntimeError, KeyboardInterrupt]))
    def fail_within_a_round(self, prompt, error):
        rounds = self.decoder.single.rounds
        rounds.take = lambda *given: (_ for _ in ()).throw(error)
        with pytest.raises(error):
            self.decoder.generate(prompt, LONGEST)
        del rounds.take

    @precondition(lambda self: self.stream is None)
    @rule(seed=st.integers(0, 9))
    def change_weights(self, seed):
        torch.manual_seed(seed)
        for model in (self.decoder.pair.target, self.decoder.pair.draft):
            changed = {
                name: weight + 0.3 * torch.randn_like(weight)
                for name, weight in model.state_dict().items()
            }
            model.load_state_dict(changed, assign=seed % 2 == 0)
        self.known.clear()

    @rule(
        by=st.sampled_from(
            [copy.copy, copy.deepcopy, lambda decoder: pickle.loads(pickle.dumps(decoder))]
        )
    )
    def go_on_with_a_copy(self, by):
        self.decoder = by(self.decoder)
        self.stream = None

    @precondition(lambda self: self.stream is None)
    @rule(asked=lists)
    def decode_in_threads(self, asked):
        def made(prompt):
            try:
                return self.decoder.generate(prompt, LONGEST).tokens.tolist()
            except UserError as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(made, asked))
        for made_of, prompt in zip(found, asked, strict=True):
            assert made_of == self.right(prompt).tokens or made_of.startswith(OPEN)
        assert any(isinstance(each, list) for each in found)

    @rule(
        prompt=prompts,
        mode=st.sampled_from(
            [torch.inference_mode, torch.enable_grad, lambda: torch.device("meta")]
        ),
    )
    def decode_in_a_mode(self, prompt, mode):
        with mode():
            self.compare(self.decoder, prompt)
            assert (
                self.decoder.generate_batch([prompt], max_batch=2, max_new_tokens=LONGEST)[
                    0
                ].tokens.tolist()
                == self.right(prompt).tokens
            )


Uses.TestCase.settings = settings(max_examples=8, stateful_step_count=10, deadline=None)
TestUses = Uses.TestCase


# --- what is refused, with one sentence


@pytest.mark.parametrize(
    "prompt",
    [
        [1.0, 2.0],
        [True, False],
        b"abc",
        ["1", "2"],
        [1, "2"],
        None,
        5,
        iter([1]),
        {"role": "user"},
        torch.tensor([1.0]),
        torch.tensor([True]),
        np.array([1.0, 2.0]),
    ],
    ids=lambda prompt: repr(prompt)[:20],
)
def test_prompts_that_are_no_ids_are_refused(prompt):
    with pytest.raises(
        UserError,
        match=(
            "^the prompt .* must be a text, a list of token ids, which are integers, or a list of"
        ),
    ):
        greedy(tiny_pair()).generate(prompt)


@pytest.mark.parametrize(
    "prompt",
    [(1, 2), range(1, 3), np.array([1, 2]), torch.tensor([[1, 2]]), [np.int64(1), np.int32(2)]],
)
def test_ids_come_in_any_form(prompt):
    decoder = greedy(tiny_pair())
    assert (
        decoder.generate(prompt, np.int64(4)).tokens.tolist()
        == decoder.generate([1, 2], 4).tokens.tolist()
    )


@pytest.mark.parametrize("given", ["abc", b"abc", {"a": [1]}, None, 5])
def test_a_single_prompt_is_no_batch(given):
    with pytest.raises(
        UserError, match=r"must be a list of prompts; put a single one into a list, or use generate"
    ):
        greedy(tiny_pair()).generate_batch(given, as_completed=True)


@pytest.mark.parametrize("count", [0, -1, float("nan"), 2.5, True, "4"])
@pytest.mark.parametrize("name", ["max_new_tokens", "max_batch"])
def test_counts_are_positive_integers(name, count):
    with pytest.raises(UserError, match=f"{name}={count!r} must be a positive integer"):
        greedy(tiny_pair()).generate_batch([[1]], **{name: count})


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, None, float("nan")])
def test_seeds_are_integers(seed):
    decoder = greedy(tiny_pair())
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(UserError, match="^seed=.* must be a non-negative integer"):
            call([1], 4, seed)
    for seeds in (seed, [seed]):
        with pytest.raises(UserError, match="seeds?=.* must be a non-negative integer"):
            decoder.generate_batch([[1]], max_batch=2, max_new_tokens=4, seeds=seeds)


def test_each_prompt_has_a_seed():
    message = "seeds has 1 numbers for 2 prompts; give one for each, or the first"
    with pytest.raises(UserError, match=message):
        greedy(tiny_pair()).generate_batch([[1], [2]], seeds=[0])


@pytest.mark.parametrize("window", [float("nan"), "many", True, 2.5, 1, 65])
def test_windows_are_integers_that_the_target_reaches(window):
    for kind in (SpeculativeDecoder, Baseline):
        with pytest.raises(
            UserError,
            match=r"^window=.* must be between 2 and 64, the positions that the target reaches",
        ):
            kind(tiny_pair(window=64), engine="eager", window=window)


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        ({"stopping": "head"}, "StoppingRule"),
        ({"verification": "block"}, "Verification"),
        ({"drafting": "chain"}, "Drafting"),
        ({"warp": 0.7}, "Warp"),
    ],
)
def test_choices_of_other_types_are_refused(choices, kind):
    ((name, value),) = choices.items()
    with pytest.raises(UserError) as error:
        SpeculativeDecoder(tiny_pair(), **choices)
    assert str(error.value).startswith(f"{name}={value!r} must be a {kind}, for example specheads.")


def test_other_arguments_of_other_types_are_refused():
    pair = tiny_pair()
    for call, name in {
        lambda: SpeculativeDecoder("nano"): "pair='nano'",
        lambda: Baseline(None): "pair=None",
        lambda: Baseline(pair, warp=0.7): "warp=0.7",
        lambda: greedy(pair).with_stopping("head"): "stopping='head'",
        lambda: greedy(pair).with_stopping(None): "stopping=None",
        lambda: greedy(pair).with_stopping(
            stopping.FixedLength(2), "block"
        ): "verification='block'",
        lambda: SpeculativeDecoder.recommended(pair, "folder"): "head='folder'",
        lambda: stopping.HeadThreshold("folder"): "head='folder'",
    }.items():
        with pytest.raises(UserError, match=f"^{name} must be an? "):
            call()


# --- batches


def test_the_prompts_of_a_batch_have_seeds_that_count_up():
    decoder = SpeculativeDecoder(tiny_pair(7), warp=Warp(), engine="eager")
    outs = decoder.generate_batch([[1, 2]] * 4, max_batch=3, max_new_tokens=12, seeds=5)
    assert [out.tokens.tolist() for out in outs] == [
        decoder.generate([1, 2], 12, 5 + n).tokens.tolist() for n in range(4)
    ]
    assert len({tuple(out.tokens.tolist()) for out in outs}) == 4
    assert [
        each.text for each in decoder.generate_batch([[1, 2]] * 4, max_batch=3, max_new_tokens=12)
    ] != [out.text for out in outs]


def test_bad_prompts_are_named_before_anything_is_decoded():
    decoder = greedy(tiny_pair(7))
    with pytest.raises(
        UserError, match="^prompt 1: the prompt is empty.*; prompt 3: .* must be a text"
    ) as error:
        decoder.generate_batch([[1], [], [2], [0.5]], max_batch=2, max_new_tokens=4)
    assert "prompt 0" not in str(error.value)
    assert not isinstance(error.value, BatchError)  # which has the responses to others
    with pytest.raises(UserError, match="prompt 7: .*; and 92 more$"):
        decoder.generate_batch([[]] * 100, max_batch=2, max_new_tokens=4)


def test_a_failure_of_one_response_leaves_the_others():
    pair = tiny_pair(7, 2.0)
    expected = greedy(pair).generate([2], 1).tokens.tolist()
    pair.target.get_input_embeddings().weight[
        next(token for token in (1, 3, 4) if token not in expected)
    ] = torch.nan
    bad = int(pair.target.get_input_embeddings().weight.isnan().any(dim=1).nonzero())
    with pytest.raises(BatchError, match="^prompt 1: tiny-target produced NaN") as error:
        greedy(pair).generate_batch([[2], [bad, bad], [2]], max_batch=3, max_new_tokens=1)
    assert {number: out.tokens.tolist() for number, out in error.value.generations.items()} == {
        0: expected,
        2: expected,
    }


@pytest.mark.parametrize("warp", [Warp(0), Warp(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kept", [(0, 1, 3), (1, 3)], ids=str)
def test_a_nan_of_a_draft_with_a_reduced_output_is_noticed(warp, kept):
    pair = tiny_pair(7, 2.0)
    keep_tokens(pair.draft, torch.tensor(kept))
    pair = replace(pair)
    pair.draft.get_input_embeddings().weight[2] = torch.nan
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(2), warp=warp, engine="eager")
    with pytest.raises(UserError, match="tiny-draft produced NaN"):
        decoder.generate([1, 2], 4)


# --- models that change, modes, processes


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    "change",
    [lambda model: model.float(), lambda model: model.bfloat16(), lambda model: model.to("meta")],
)
def test_a_model_that_is_cast_or_moved_asks_for_another_decoder(role, change):
    pair = tiny_pair()
    decoder = greedy(pair)
    decoder.generate([1], 4)
    decoder.generate_batch([[1]], max_batch=2, max_new_tokens=4)
    change(getattr(pair, role))
    for call in (
        decoder.generate,
        lambda prompt: decoder.generate_batch([prompt], max_batch=2),
        decoder.with_stopping(stopping.FixedLength(2)).generate,
    ):
        with pytest.raises(
            UserError,
            match="is .* on .*, but this decoder was made when it was float64 on cpu; make another",
        ):
            call([1])


def test_models_without_numbers_are_refused():
    pair = tiny_pair()
    pair.target.to("meta")
    with pytest.raises(UserError, match="is on the device meta, where tensors have no numbers"):
        greedy(pair)
    with pytest.raises(UserError, match="device='meta' cannot be used here"):
        load_pair("nano", device="meta")


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")])
@pytest.mark.parametrize("used", [False, True])
def test_a_decoder_that_was_made_in_a_mode_serves_outside_of_it(mode, used):
    pair = tiny_pair(7, 2.0)
    rule_of = stopping.OnlineLogistic
    expected = greedy(pair).generate(PROMPTS[0], LONGEST).tokens.tolist()
    with mode():
        decoder = greedy(pair, stopping=rule_of())
        opened = decoder.stream(PROMPTS[0], LONGEST)
        if used:
            next(opened)
            decoder.generate_batch([PROMPTS[0]], max_batch=2, max_new_tokens=LONGEST)
    list(opened)
    outs = [
        decoder.generate(PROMPTS[0], LONGEST),
        *decoder.generate_batch([PROMPTS[0]] * 2, max_batch=2, max_new_tokens=LONGEST),
    ]
    assert [out.tokens.tolist() for out in outs] == [expected] * 3
    assert not outs[0].tokens.is_inference()


@pytest.mark.parametrize(
    "begins", [False, True], ids=["alone", "while another thread begins a call"]
)
def test_a_fork_can_decode(begins, nano):
    """Also where its parent has computed with several threads, which it lacks."""
    decoder = greedy(nano)
    prompt = "def mean(values):\n" * 16
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = decoder.generate(prompt, LONGEST).tokens.tolist()
        if begins:
            batching._lock.acquire()
        process = os.fork()
        if process and begins:
            batching._lock.release()
        if not process:
            signal.alarm(60)  # ends one that waits for ever
            try:
                os._exit(0 if decoder.generate(prompt, LONGEST).tokens.tolist() == expected else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        assert decoder.generate(prompt, LONGEST).tokens.tolist() == expected
    finally:
        torch.set_num_threads(threads)


def test_what_is_being_prepared_is_not_decoded():
    decoder = greedy(tiny_pair(7))
    opened = decoder.stream([1], 20)
    next(opened)
    for call in (decoder.prepare, decoder.warm_up):
        with pytest.raises(UserError, match=OPEN):
            call()


# --- a rule of your own, and what a notebook shows


class Third(stopping.StoppingRule):
    """A rule with the two methods that every rule needs."""

    def start_prompt(self, batch, device):
        return CountingState(*torch.zeros(3, batch, dtype=torch.long, device=device))

    def step(self, state, features):
        assert set(features) == {"draft_prob", "max_prob", "entropy"}
        state = state._replace(num_drafted=state.num_drafted + 1)
        return state, state.num_drafted >= 3


@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
def test_a_rule_needs_two_methods(engine):
    pair = tiny_pair(7, 2.0)
    decoder = SpeculativeDecoder(pair, stopping=Third(), warp=GREEDY, engine=engine)
    out = decoder.generate(PROMPTS[0], 20)
    assert out.tokens.tolist() == greedy(pair).generate(PROMPTS[0], 20).tokens.tolist()
    assert {made.num_drafted for made in out.rounds} <= {0, 1, 2, 3} and out.rounds[
        0
    ].num_drafted == 3
    assert (
        Third().compile_key != Third().compile_key
        and decoder.stopping.compile_key == decoder.stopping.compile_key
    )
