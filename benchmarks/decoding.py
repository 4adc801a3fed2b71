"""How fast is decoding, next to what a user would pick instead?

    python benchmarks/decoding.py --head outputs/head/<date_time>/heads/<name> [--model nano] [--prompts 8] [--repeats 5]
    python benchmarks/decoding.py --model synthetic-llama3 --rate 0.8

Without `--head` an untrained head is used; with `--rate` drafted tokens are accepted at that rate, independent of the models,
and transformers' assisted generation, which cannot do that, is left out.

One process, greedy and sampled. In each repeat all settings decode the same prompts in turn; a figure is the median over repeats.
Prints tokens per second of transformers' plain and assisted generation and of this project's decoder, of whole calls with the
reading of the prompt on both sides; where a round's time goes; time per token as the context grows; and the head's share of a
draft step of Llama-2-7B. The steps themselves are timed by steps.py.
"""

import argparse
import contextlib
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_keep_option, prompt_record, text_of, write_result
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, load_head, load_pair
from specheads.decoding.baseline import Baseline
from specheads.decoding.drafting import Autoregressive
from specheads.decoding.records import DecodeStats, Round
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.decoding.verification import SyntheticVerification, TokenVerification, VerificationRule
from specheads.integrations.transformers import assist
from specheads.pair import Pair
from specheads.prompts.nano_source import NanoSource

FIXED, THRESHOLDS, CONTEXTS = (2, 3, 4, 6, 8), (0.3, 0.5, 0.7), (128, 512, 2048)
STAGES = ("draft", "stop", "verify", "commit", "host gaps")


@dataclass
class Made:
    """What decoding some prompts made and took."""

    tokens: int = 0
    seconds: float = 0.0  # of whole calls, with the reading of prompts: transformers' generate does not tell it apart
    rounds: list[Round] = field(default_factory=list)
    draft_seconds: float = 0.0  # in which draft steps ran, stopping rule and all
    verify_seconds: float = 0.0  # in which verifications ran

    def __add__(self, other: "Made") -> "Made":
        return Made(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


Run = Callable[[list[int], int], Made]  # prompt, seed


class Stopwatch:
    """Runs a compiled step and adds up the seconds that the device spent on it."""

    def __init__(self, compiled_step: Callable, device: torch.device) -> None:
        self.compiled_step, self.device, self.on_gpu, self.spans = compiled_step, device, device.type == "cuda", []

    def __call__(self, *args: object) -> object:
        start = self._now()
        out = self.compiled_step(*args)
        self.spans.append((start, self._now()))
        return out

    def take(self) -> float:
        """Return the seconds since the last call of this."""
        spans, self.spans = self.spans, []
        return sum(start.elapsed_time(end) / 1e3 if self.on_gpu else end - start for start, end in spans)

    def _now(self) -> "float | torch.cuda.Event":
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def transformers_runs(pair: Pair, head: AcceptanceHead, warp: Warp, length: int, assisted: bool) -> dict[str, Run]:
    """Return transformers' generation from the pair; with `assisted` also its assisted generation, without and with the head."""
    chosen = {"do_sample": False} if warp.greedy else {"do_sample": True, "temperature": warp.temperature, "top_k": warp.top_k}
    chosen |= {} if warp.greedy else {"top_p": warp.top_p, "repetition_penalty": 1.0}
    chosen |= {"max_new_tokens": length, "pad_token_id": 0}

    def run(assistant: dict | None, threshold: float | None = None) -> Run:
        config = copy.deepcopy(
            pair.draft.generation_config
        )  # kept from call to call, because the heuristic continues from its last length
        for name, value in (assistant or {}).items():
            setattr(config, name, value)

        def generate(prompt: list[int], seed: int) -> Made:
            ids = torch.tensor([prompt], device=pair.target_lm.device)
            torch.manual_seed(seed)
            draft = None if assistant is None else pair.draft
            pair.draft.generation_config = config
            start = time.perf_counter()
            asked = (
                contextlib.nullcontext()
                if threshold is None
                else assist(pair.target, pair.draft, head, threshold, any_draft=True)
            )
            with asked:
                out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **chosen)
            return Made(out.shape[1] - len(prompt), time.perf_counter() - start)

        return generate

    def assistant(tokens: int, schedule: str = "constant", confidence: float = 0.0) -> dict:
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        return dict(zip(names, (tokens, schedule, confidence), strict=True))

    runs = {"transformers, plain": run(None)}
    if not assisted:
        return runs
    runs |= {f"transformers, assisted, K={k}": run(assistant(k)) for k in FIXED}
    runs["transformers, assisted, heuristic"] = run(assistant(5, "heuristic"))
    runs["transformers, assisted, confidence 0.4"] = run(assistant(20, confidence=0.4))
    runs |= {f"transformers with the head, {t}": run({}, t) for t in THRESHOLDS}
    return runs


def own_runs(
    pair: Pair, head: AcceptanceHead, warp: Warp, length: int, engine: str, verification: VerificationRule
) -> tuple[dict[str, Run], float]:
    """Return this project's decoders and the seconds that getting them ready took."""
    decoder = SpeculativeDecoder(pair, verification=verification, warp=warp, engine=engine)
    ahead = SpeculativeDecoder(pair, Autoregressive(ahead=True), HeadThreshold(head, 0.5), verification, warp, engine)
    decoders = {"target alone": Baseline(pair, warp, decoder.target_engine)}
    decoders |= {f"fixed K={k}": decoder.with_stopping(FixedLength(k)) for k in FIXED}
    decoders |= {f"head {t}": decoder.with_stopping(HeadThreshold(head, t)) for t in THRESHOLDS}
    decoders["head 0.5, a step ahead of its flag"] = ahead
    startup = sum(each.warm_up() for each in decoders.values())

    def run(each: SpeculativeDecoder | Baseline) -> Run:
        device, speculative = pair.target_lm.device, isinstance(each, SpeculativeDecoder)
        if speculative:
            each._drafter._step = draft = Stopwatch(each._drafter._step, pair.draft_lm.device)
            each._verifier._compiled_step = verify = Stopwatch(each._verifier._compiled_step, device)
        else:
            each._compiled_step = verify = Stopwatch(each._compiled_step, device)

        def generate(prompt: list[int], seed: int) -> Made:
            start = time.perf_counter()
            out = each.generate(prompt, length, seed=seed)
            seconds = time.perf_counter() - start
            return Made(len(out.tokens), seconds, list(out.rounds), draft.take() if speculative else 0.0, verify.take())

        return generate

    return {name: run(each) for name, each in decoders.items()}, startup


def compare(runs: dict[str, Run], prompts: list[list[int]], repeats: int) -> dict[str, list[Made]]:
    """Return what every run made in each repeat."""
    for run in runs.values():
        run(prompts[0], 0)
    made = {name: [] for name in runs}
    for repeat in range(repeats):
        names = list(runs)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            total = Made()
            for number, prompt in enumerate(prompts):
                total = total + runs[name](prompt, 1000 * repeat + number)
            made[name].append(total)
    return made


def speed_table(made: dict[str, list[Made]], mode: str) -> Table:
    """Return how fast each setting is, next to transformers' generation, and where a round's time goes."""
    speeds = {name: statistics.median(each.tokens / each.seconds for each in all_) for name, all_ in made.items()}
    plain = speeds["transformers, plain"]
    best = max((name for name in speeds if "assisted" in name), key=speeds.get, default=None)
    fixed = made[f"fixed K={FIXED[2]}"]
    step = statistics.median(each.draft_seconds / DecodeStats.of(each.rounds).num_draft_calls for each in fixed)
    rows = []
    for name, speed in speeds.items():
        shown = [None] * (1 + len(STAGES))
        if made[name][0].rounds:
            efficiency = DecodeStats.of([part for each in made[name] for part in each.rounds]).block_efficiency
            stages = zip(*(round_stages(each, step) for each in made[name]), strict=True)
            shown = [efficiency, *(max(0.0, statistics.median(values)) for values in stages)]
        rows.append([name, speed, speed / plain, speed / speeds[best] if best else None, *shown])
    columns = [
        Column("setting"),
        Column("tokens/s", "fixed:0"),
        Column("over plain", "ratio"),
        Column("over best assisted", "ratio"),
    ]
    columns += [Column("tokens per round", "fixed"), *(Column(stage, "ms") for stage in STAGES)]
    longest = made[f"fixed K={FIXED[-1]}"]
    over = [sum(r.seconds for r in each.rounds) / (each.draft_seconds + each.verify_seconds) for each in longest]
    title = f"{mode}; a whole round with K={FIXED[-1]} takes {statistics.median(over):.2f}x of its forward passes alone"
    return Table(mode.split(maxsplit=1)[0].strip(";").lower(), title, columns, rows)


def round_stages(made: Made, step: float) -> tuple[float, ...]:
    """Return the mean seconds of STAGES in a round; `step`: those of a draft step with a fixed length.

    A rule's seconds in a compiled step are those beyond such a step. Host gaps are the rest: the device waits for the host.
    """
    calls, count = DecodeStats.of(made.rounds).num_draft_calls, len(made.rounds)
    draft = min(made.draft_seconds, calls * step)
    stages = (draft, made.draft_seconds - draft, made.verify_seconds, sum(part.commit_seconds for part in made.rounds))
    total = sum(part.seconds for part in made.rounds)
    return tuple(value / count for value in (*stages, total - sum(stages)))


def never_rows(
    pair: Pair, head: AcceptanceHead, warp: Warp, engine: str, prompts: list[list[int]], length: int, repeats: int
) -> list[list]:
    """Time a head that never stops next to fixed lengths, round by round: both draft the same tokens.

    A round's time is its median over repeats, which disturbances of the machine hardly change.
    """
    decoder, rows = SpeculativeDecoder(pair, warp=warp, engine=engine), []
    for most in (FIXED[2], FIXED[4]):
        both = [decoder.with_stopping(rule) for rule in (FixedLength(most), HeadThreshold(head, 1.0, 1, most))]
        seconds = [0.0, 0.0]
        for each in both:
            each.generate(prompts[0], length)
        for number, prompt in enumerate(prompts):
            taken = [[], []]
            for repeat in range(repeats):
                for which in (0, 1) if repeat % 2 else (1, 0):
                    taken[which].append([part.seconds for part in both[which].generate(prompt, length, seed=number).rounds])
            for which in (0, 1):
                seconds[which] += sum(statistics.median(parts) for parts in zip(*taken[which], strict=True))
        rows.append(["greedy" if warp.greedy else "sampled", most, seconds[1] / seconds[0] - 1])
    return rows


def context_table(pair: Pair, head: AcceptanceHead, warp: Warp, engine: str, text: list[int], length: int, repeats: int) -> Table:
    """Time per token after contexts of several lengths, the prompt itself not counted."""
    decoder = SpeculativeDecoder(pair, stopping=HeadThreshold(head, 0.5), warp=warp, engine=engine)
    ways = {"target alone": Baseline(pair, warp, decoder.target_engine), "head 0.5": decoder}
    rows = []
    for context in CONTEXTS:
        size = min(context, pair.window) - length
        prompt = (text * (1 + size // len(text)))[:size]
        taken = {name: [] for name in ways}
        for repeat in range(repeats + 1):
            for name, way in ways.items():
                out = way.generate(prompt, length, seed=repeat, stop_tokens=()).stats
                taken[name].append(1e3 * out.decode_seconds / out.num_tokens)
        rows.append([size, *(statistics.median(values[1:]) / 1e3 for values in taken.values())])
    columns = [Column("context"), *(Column(f"{name}, per token", "ms") for name in ways)]
    return Table("contexts", "Sampled, the time of reading the prompt not counted", columns, rows)


def share_table() -> Table:
    """Count the multiply-adds (as many as weights, at one token) of heads next to a forward pass of Llama-2-7B."""
    rows = []
    with torch.device("meta"):
        draft = LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, vocab_size=32000))
        weights = sum(w.numel() for w in draft.parameters()) - draft.get_input_embeddings().weight.numel()
        for predicts in ("next_token", "input_token"):
            head = AcceptanceHead(HeadConfig(4096, embedding_size=4096, predicts=predicts))
            share = sum(w.numel() for w in head.parameters()) / weights
            rows.append([f"`{predicts}`", share, 2 * share])
    columns = [Column("head"), Column("of the multiply-adds", "percent:2"), Column("of the bytes", "percent:2")]
    return Table("share", "A head in float32 next to a draft step at the shape of Llama 2 7B in bfloat16, counted", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", help="a folder that train.py exported")
    parser.add_argument("--rate", type=float, help="accept drafted tokens at this rate: timing without text")
    parser.add_argument("--model", default="nano", help="a file of conf/model")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    add_keep_option(parser, "decoding")
    arguments = parser.parse_args()
    pair = load_pair(arguments.model)
    head = load_head(arguments.head) if arguments.head else AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size))
    head.requires_grad_(False)
    verification = TokenVerification() if arguments.rate is None else SyntheticVerification(arguments.rate)
    loaded = list(NanoSource(arguments.prompts, 0, 0).load(pair.chats))
    prompts = [pair.encode_instruction(prompt.text) for prompt in loaded]
    tables, never = [], []
    for warp in (Warp(temperature=0), Warp(temperature=1.0, top_k=50)):
        ours, startup = own_runs(pair, head, warp, arguments.new_tokens, arguments.engine, verification)
        runs = {**transformers_runs(pair, head, warp, arguments.new_tokens, arguments.rate is None), **ours}
        mode = f"{'Greedy' if warp.greedy else 'Sampled at temperature 1, top-k 50'}; start-up of all settings {startup:.1f} s"
        keep(tables, speed_table(compare(runs, prompts, arguments.repeats), mode))
        never += never_rows(pair, head, warp, arguments.engine, prompts, arguments.new_tokens, 3 * arguments.repeats)
    columns = [Column("mode"), Column("K"), Column("over the fixed length", "signed_percent")]
    title = f"Time of a head that never stops over a fixed length of as many tokens, medians of {3 * arguments.repeats}"
    keep(tables, Table("never", title, columns, never))
    text = [token for prompt in prompts for token in prompt]
    keep(tables, context_table(pair, head, warp, arguments.engine, text, 64, arguments.repeats))
    keep(tables, share_table())
    note = f"{pair.name}, {len(prompts)} prompts, at most {arguments.new_tokens} tokens, {verification.label}, medians of "
    note += f"{arguments.repeats} repeats."
    seeds = [1000 * repeat for repeat in range(arguments.repeats)]
    record = prompt_record(prompt.prompt_id for prompt in loaded)
    write_result("decoding", tables, split="train", seeds=seeds, prompts=record, notes=note, keep=arguments.keep)


def keep(tables: list[Table], table: Table) -> None:
    """Print a table and put it to the others."""
    print(f"\n{table.title}\n\n{text_of(table)}", flush=True)
    tables.append(table)


if __name__ == "__main__":
    main()
