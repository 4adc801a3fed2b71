"""How fast is decoding, next to what a user would pick instead?

    python benchmarks/decoding.py --head outputs/head/<date_time>/heads/<name> [--model nano] [--prompts 8] [--repeats 5]
    python benchmarks/decoding.py --model synthetic-llama3 --rate 0.8

Without `--head` an untrained head is used; with `--rate` drafted tokens are accepted at that rate, independent of the models, and
transformers' assisted generation, which cannot do that, is left out.

One process, greedy and sampled. In each repeat all settings decode the same prompts in turn; a figure is the median over repeats.
Prints tokens per second of transformers' plain and assisted generation and of this project's decoder, of whole calls with the
reading of the prompt on both sides; where a round's time goes; and time per token as the context grows. The steps themselves are
timed by steps.py.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_workers.local_worker import transformers_generation
from benchmarks.peers import PLAIN, assisted
from benchmarks.results import Column, Table, Value, add_keep_option, prompt_record, text_of, write_result
from benchmarks.steps import WARPS, target_alone
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, load_head, load_pair
from specheads.decoding.records import DecodeStats, Round
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.decoding.verification import SyntheticVerification, TokenVerification, VerificationRule
from specheads.integrations.transformers import assist
from specheads.pair.pair import Pair
from specheads.prompts.sources import NanoSource

FIXED, THRESHOLDS, CONTEXTS = (2, 3, 4, 6, 8), (0.3, 0.5, 0.7), (128, 512, 2048)
STAGES = ("draft", "verify", "commit")
COLUMNS = [Column("setting"), Column("tokens/s", "fixed:0"), Column("over plain", "ratio"), Column("over best assisted", "ratio")]
COLUMNS += [Column("tokens per round", "fixed"), *(Column(stage, "ms") for stage in STAGES)]


@dataclass
class _Made:
    """What decoding some prompts made and took: whole calls, as transformers does not tell the reading of a prompt apart."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: list[Round] = field(default_factory=list)


Run = Callable[[list[int], int], _Made]  # prompt, seed


def _transformers_runs(pair: Pair, head: AcceptanceHead, greedy: bool, length: int, with_draft: bool) -> dict[str, Run]:
    """Return transformers' generation from the pair; `with_draft` also its assisted generation, without and with the head."""
    generation = transformers_generation(pair)

    def run(options: Mapping[str, Any], threshold: float | None = None) -> Run:
        def generate(prompt: list[int], seed: int) -> _Made:
            asked = assist(pair.target, pair.draft, head, threshold, any_draft=True) if threshold else contextlib.nullcontext()
            with asked:
                tokens, seconds = generation(options, greedy, prompt, length, seed)
            return _Made(len(tokens), seconds)

        return generate

    runs = {PLAIN: run({})}
    if with_draft:
        runs |= {f"transformers, assisted, {name}": run(options) for name, options in assisted(FIXED).items()}
        usual = {"num_assistant_tokens": pair.draft.generation_config.num_assistant_tokens}
        runs |= {f"transformers with the head, {threshold}": run(usual, threshold) for threshold in THRESHOLDS}
    return runs


def _own_runs(decoder: SpeculativeDecoder, head: AcceptanceHead, length: int) -> tuple[dict[str, Run], float]:
    """Return this project's ways to decode and the seconds that getting them ready took."""
    decoders: dict[str, Any] = {"target alone": target_alone(decoder)}
    decoders |= {f"fixed K={k}": decoder.with_stopping(FixedLength(k)) for k in FIXED}
    decoders |= {f"head {t}": decoder.with_stopping(HeadThreshold(head, t)) for t in THRESHOLDS}
    startup = sum(each.warm_up() for each in decoders.values())

    def run(each: Any) -> Run:
        def generate(prompt: list[int], seed: int) -> _Made:
            start = time.perf_counter()
            out = each.generate(prompt, length, seed=seed)
            return _Made(len(out.tokens), time.perf_counter() - start, list(out.rounds))

        return generate

    return {name: run(each) for name, each in decoders.items()}, startup


def _compare(runs: Mapping[str, Run], prompts: Sequence[list[int]], repeats: int) -> dict[str, list[_Made]]:
    """Return what every run made of all prompts in each repeat."""
    for run in runs.values():
        run(prompts[0], 0)
    made: dict[str, list[_Made]] = {name: [] for name in runs}
    for repeat in range(repeats):
        names = list(runs)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            parts = [runs[name](prompt, 1000 * repeat + number) for number, prompt in enumerate(prompts)]
            rounds = [each for part in parts for each in part.rounds]
            made[name].append(_Made(sum(part.tokens for part in parts), sum(part.seconds for part in parts), rounds))
    return made


def _speed_table(made: Mapping[str, Sequence[_Made]], mode: str, startup: float) -> Table:
    """Return how fast each setting is, next to transformers' generation, and the mean seconds of a round's stages."""
    speeds = {name: statistics.median(each.tokens / each.seconds for each in repeats) for name, repeats in made.items()}
    assisted = [speed for name, speed in speeds.items() if "assisted" in name]
    rows: list[list[Value]] = []
    for name, speed in speeds.items():
        row: list[Value] = [name, speed, speed / speeds[PLAIN], speed / max(assisted) if assisted else None]
        rounds = [each for repeat in made[name] for each in repeat.rounds]
        # A stopping rule runs within the draft's stage.
        stages = [statistics.fmean(getattr(each, f"{stage}_seconds") for each in rounds) if rounds else None for stage in STAGES]
        rows.append([*row, DecodeStats.of(rounds).block_efficiency if rounds else None, *stages])
    return Table(mode, f"{mode.capitalize()}; start-up of all settings {startup:.1f} s", COLUMNS, rows)


def _context_table(decoder: SpeculativeDecoder, text: list[int], length: int, repeats: int) -> Table:
    """Return the time per token after contexts of several lengths, the prompt itself not counted."""
    ways: dict[str, Any] = {"target alone": target_alone(decoder), "head 0.5": decoder}
    rows: list[list[Value]] = []
    for context in CONTEXTS:
        size = min(context, decoder.pair.window) - length
        prompt = (text * (1 + size // len(text)))[:size]
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(repeats + 1):  # the first warms up
            for name, way in ways.items():
                stats = way.generate(prompt, length, seed=repeat, stop_tokens=()).stats
                taken[name].append(stats.decode_seconds / stats.num_tokens)
        rows.append([size, *(statistics.median(values[1:]) for values in taken.values())])
    columns = [Column("context"), *(Column(f"{name}, per token", "ms") for name in ways)]
    return Table("contexts", "Sampled, the time of reading the prompt not counted", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", help="a folder that specheads train exported")
    parser.add_argument("--rate", type=float, help="accept drafted tokens at this rate: timing without text")
    parser.add_argument("--model", default="nano", help="a file of conf/model")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    add_keep_option(parser, "decoding")
    given = parser.parse_args()
    pair = load_pair(given.model)
    head = load_head(given.head) if given.head else AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size))
    head.requires_grad_(False)
    verification: VerificationRule = TokenVerification() if given.rate is None else SyntheticVerification(given.rate)
    loaded = list(NanoSource(given.prompts, 0, 0).load(pair.chats))
    prompts = [pair.encode_instruction(prompt.text) for prompt in loaded]
    tables = []
    for mode, warp in WARPS.items():
        chosen = {"verification": verification, "warp": warp, "engine": given.engine}
        decoder = SpeculativeDecoder(pair, stopping=HeadThreshold(head, 0.5), **chosen)
        ours, startup = _own_runs(decoder, head, given.new_tokens)
        runs = _transformers_runs(pair, head, warp.greedy, given.new_tokens, given.rate is None) | ours
        tables.append(_speed_table(_compare(runs, prompts, given.repeats), mode, startup))
        print(f"\n{tables[-1].title}\n\n{text_of(tables[-1])}", flush=True)
    tables.append(_context_table(decoder, [token for prompt in prompts for token in prompt], 64, given.repeats))
    print(f"\n{tables[-1].title}\n\n{text_of(tables[-1])}")
    note = f"{pair.name}, at most {given.new_tokens} tokens, {verification.label}, medians of {given.repeats} repeats."
    seeds = [1000 * repeat for repeat in range(given.repeats)]
    read = prompt_record(prompt.prompt_id for prompt in loaded)
    write_result("decoding", tables, split="train", seeds=seeds, prompts=read, notes=note, keep=given.keep)


if __name__ == "__main__":
    main()
