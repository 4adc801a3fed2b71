"""What does a step of the target read per second, what do a verification and a draft step cost, and what of a round is neither?

How many tokens per second do the target's responses and their labels take? The pair has the shapes of Llama 3.1 8B and Llama
3.2 1B, random weights, and an untrained head; prompts are random tokens. Steps are timed as steps.py times them. Rounds accept
drafted tokens at a given rate, whatever the models say, and no response ends early.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.machine import Machine
from benchmarks.results import Column, Table, Value
from benchmarks.steps import ALONE, DRAFT, DRAFT_WITH_HEAD, WARPS, seconds_of, timed, weight_bytes
from data_gen.rows import label_responses
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder
from specheads.decoding.records import DecodeStats
from specheads.decoding.responses import Responder
from specheads.decoding.stopping import FixedLength, HeadThreshold, StoppingRule
from specheads.decoding.verification import SyntheticVerification
from specheads.pair.pair import Pair
from specheads.prompts.prompt import ResponseLimits

ROWS = (1, 16, 64)  # responses that are written together
NEW_TOKENS, SAMPLES = 128, 2  # tokens of prompts and of responses; drafted tokens that are labelled at each position
VERIFIED = (2, 3, 4, 5, 6, 8, 9, 12, 16, 20)  # tokens that a verification reads
CONTEXT, WINDOW = 256, 1024
ACCEPTANCE = 0.8  # the rate of synthetic verification
LENGTHS = (4, 8)  # lengths of the drafts of timed rounds
VERIFICATION = "verification of 8"  # the goal speaks of it, and its time stands for that of every round


@torch.no_grad()
def round_tables(setup: Machine, goals: dict[str, float]) -> Iterator[Table]:
    """Yield the tables of steps and rounds; put what was reached into `goals`."""
    pair = setup.pair()
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size)).to(setup.device).requires_grad_(False)
    context = 32 if setup.tiny else CONTEXT
    (prompt,) = _texts(pair, 1, context)
    rows, by_mode = list[list[Value]](), dict[str, dict[str, float]]()
    for mode in WARPS:
        decoder = _decoder(setup, pair, HeadThreshold(head), mode)
        seconds = by_mode[mode] = seconds_of(decoder, context, setup.repeats, (8, 9) if setup.tiny else VERIFIED)
        read = {name: weight_bytes(pair.draft_lm if name.startswith(DRAFT) else pair.target_lm) for name in seconds}
        shares = {name: read[name] / taken / setup.bandwidth for name, taken in seconds.items()}
        rows += [[mode, name, taken, shares[name], taken / seconds[ALONE]] for name, taken in seconds.items()]
        goals["target_alone"], goals["verification_of_8"] = shares[ALONE], seconds[VERIFICATION] / seconds[ALONE]
    columns = [Column("decoding"), Column("step"), Column("time", "ms:3"), Column("weights read at, of the bandwidth", "percent")]
    columns.append(Column("over the target alone", "ratio"))
    yield Table("steps", f"Steps of {pair.name} at {context} positions of context, medians of {setup.repeats}", columns, rows)
    rounds = [*_rounds(setup, pair, head, prompt, by_mode["sampled"])]
    goals["round"] = rounds[0][-1]
    columns = [Column("rule"), Column("a round", "ms:3"), Column("tokens per round", "fixed"), Column("over its steps", "ratio")]
    yield Table("rounds", f"Rounds whose drafts are accepted at a rate of {ACCEPTANCE}", columns, rounds)


def _decoder(setup: Machine, pair: Pair, rule: StoppingRule, mode: str, **choices: Any) -> SpeculativeDecoder:
    window = 128 if setup.tiny else WINDOW
    return SpeculativeDecoder(pair, stopping=rule, warp=WARPS[mode], engine=setup.engine, window=window, **choices)


def _rounds(setup: Machine, pair: Pair, head: AcceptanceHead, prompt: list[int], steps: dict[str, float]) -> Iterator[list[Any]]:
    """Yield the seconds of each rule's rounds, and those over the steps that they consist of, timed alone."""
    decoder = _decoder(setup, pair, FixedLength(max(LENGTHS)), "sampled", verification=SyntheticVerification(ACCEPTANCE))
    rules: dict[str, StoppingRule] = {f"fixed K={length}": FixedLength(length) for length in LENGTHS}
    rules["head"] = HeadThreshold(head, 1.0, 1, LENGTHS[0])
    for name, rule in rules.items():
        each = decoder.with_stopping(rule)
        each.warm_up()
        for seed in (0, 1):  # the first is not timed
            stats = DecodeStats.of(each.generate(prompt, 16 if setup.tiny else 256, seed=seed).rounds)
        alone = stats.num_draft_calls * steps[DRAFT_WITH_HEAD if name == "head" else DRAFT]
        alone += stats.num_target_calls * steps[VERIFICATION]
        yield [name, stats.decode_seconds / stats.num_target_calls, stats.block_efficiency, stats.decode_seconds / alone]


@torch.no_grad()
def data_tables(setup: Machine, goals: dict[str, float]) -> Iterator[Table]:
    """Yield the table of the speeds at which data are made."""
    pair, count, length = setup.pair(), 2 if setup.tiny else max(ROWS), 8 if setup.tiny else NEW_TOKENS
    texts, warp, rows = _texts(pair, count, length), WARPS["sampled"], list[list[Value]]()
    uniform = np.random.default_rng(0).random((count, SAMPLES, length))
    for size in ROWS[:1] if setup.tiny else ROWS:
        limits = ResponseLimits(length, batch_size=size)
        responder = Responder(pair, [length] * size, limits, engine=setup.engine)
        respond = partial(responder.respond, texts[:size], uniform[:size, 0], warp)
        written = sum(len(response.ids) for response in respond())
        rows.append([f"responses, {size} at once", written / timed(respond, setup.device, 1)])
    label = partial(label_responses, pair, texts, texts, uniform, warp)
    rows.append([f"labels of {SAMPLES} drafted tokens at each position", count * length / timed(label, setup.device, 1)])
    columns = [Column("what"), Column("tokens/s", "fixed:0")]
    yield Table("data", f"Making data with {pair.name}, responses of {length} tokens", columns, rows)


def _texts(pair: Pair, count: int, length: int) -> list[list[int]]:
    """Return texts of random tokens, (count, length) ids, the same ones each time."""
    return torch.randint(pair.vocab_size, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
