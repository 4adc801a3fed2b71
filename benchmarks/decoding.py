"""How fast is decoding, beside what a user would pick instead?

    python benchmarks/decoding.py --head outputs/head/<date_time>/heads/<name> [--model nano] [--prompts 8] [--repeats 5]

One process, greedy and sampled. In each repeat all settings decode the same prompts in turn; a figure is the median over repeats.
Prints tokens per second of transformers' plain and assisted generation and of this project's decoder; where a round's time goes;
how near single forwards come to the limit of memory bandwidth; time per token as the context grows; and the head's share of a
draft step of Llama-2-7B.
"""

import argparse
import copy
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from data_gen.prompts import NanoSource
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, load_head, load_pair
from specheads.decoding.decoder import Baseline
from specheads.decoding.engine import Engine
from specheads.decoding.records import DecodeStats, Round
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.pair import LanguageModel, Pair

FIXED, THRESHOLDS, CONTEXTS = (2, 4, 6, 8), (0.3, 0.5, 0.7), (128, 512, 2048)
NEVER = 4  # tokens of the head rule that never stops before, beside the fixed length of as many
Run = Callable[[list[int], int], tuple[int, float, list[Round]]]  # prompt, seed -> tokens, seconds, rounds


def transformers_runs(pair: Pair, warp: Warp, length: int) -> dict[str, Run]:
    """Return transformers' own ways to generate from the pair."""
    chosen = {"do_sample": False} if warp.greedy else {"do_sample": True, "temperature": warp.temperature, "top_k": warp.top_k}
    chosen |= {} if warp.greedy else {"top_p": warp.top_p, "repetition_penalty": 1.0}
    chosen |= {"max_new_tokens": length, "pad_token_id": 0}

    def run(assistant: dict | None) -> Run:
        config = copy.deepcopy(pair.draft.generation_config)  # kept from call to call: the heuristic goes on from where it was
        for name, value in (assistant or {}).items():
            setattr(config, name, value)

        def generate(prompt: list[int], seed: int) -> tuple[int, float, list[Round]]:
            ids = torch.tensor([prompt], device=pair.target_lm.device)
            torch.manual_seed(seed)
            draft = None if assistant is None else pair.draft
            pair.draft.generation_config = config
            start = time.perf_counter()
            out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **chosen)
            return out.shape[1] - len(prompt), time.perf_counter() - start, []

        return generate

    def assistant(tokens: int, schedule: str = "constant", confidence: float = 0.0) -> dict:
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        return dict(zip(names, (tokens, schedule, confidence), strict=True))

    runs = {"transformers, plain": run(None)}
    runs |= {f"transformers, assisted, K={k}": run(assistant(k)) for k in FIXED}
    runs["transformers, assisted, heuristic"] = run(assistant(5, "heuristic"))
    runs["transformers, assisted, confidence 0.4"] = run(assistant(20, confidence=0.4))
    return runs


def own_runs(pair: Pair, head: AcceptanceHead, warp: Warp, length: int, engine: str) -> tuple[dict[str, Run], float]:
    """Return this project's decoders and the seconds that getting them ready took."""
    decoder = SpeculativeDecoder(pair, warp=warp, engine=engine)
    decoders = {"target alone": Baseline(pair, warp, decoder.target_engine)}
    decoders |= {f"fixed K={k}": decoder.with_stopping(FixedLength(k)) for k in FIXED}
    decoders |= {f"head {t}": decoder.with_stopping(HeadThreshold(head, t)) for t in THRESHOLDS}
    decoders[f"head that never stops, K={NEVER}"] = decoder.with_stopping(HeadThreshold(head, 1.0, 1, NEVER))
    startup = sum(one.warm_up() for one in decoders.values())

    def run(one: SpeculativeDecoder | Baseline) -> Run:
        def generate(prompt: list[int], seed: int) -> tuple[int, float, list[Round]]:
            start = time.perf_counter()
            out = one.generate(prompt, length, seed=seed)
            return len(out.tokens), time.perf_counter() - start, list(out.rounds)

        return generate

    return {name: run(one) for name, one in decoders.items()}, startup


def compare(runs: dict[str, Run], prompts: list[list[int]], repeats: int) -> tuple[dict[str, float], dict[str, list[Round]]]:
    """Return tokens per second of every run, and the rounds of those that have rounds."""
    for run in runs.values():
        run(prompts[0], 0)
    speeds, rounds = {name: [] for name in runs}, {name: [] for name in runs}
    for repeat in range(repeats):
        names = list(runs)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            tokens = seconds = 0
            for number, prompt in enumerate(prompts):
                made, took, parts = runs[name](prompt, 1000 * repeat + number)
                tokens, seconds, rounds[name] = tokens + made, seconds + took, rounds[name] + parts
            speeds[name].append(tokens / seconds)
    return {name: statistics.median(values) for name, values in speeds.items()}, rounds


def print_speeds(speeds: dict[str, float], rounds: dict[str, list[Round]]) -> None:
    plain = speeds["transformers, plain"]
    best = max((name for name in speeds if "assisted" in name), key=speeds.get)
    print(f"transformers' best assisted setting: {best}\n")
    print("| setting | tokens/s | over plain | over best assisted | tokens per round | draft ms | verify ms | commit ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name, speed in speeds.items():
        parts = rounds[name]
        shown = ["", "", "", ""]
        if parts:
            columns = [statistics.median(1e3 * getattr(part, f"{stage}_seconds") for part in parts) for stage in STAGES]
            shown = [f"{DecodeStats.of(parts).block_efficiency:.2f}", *(f"{value:.2f}" for value in columns)]
        print(f"| {name} | {speed:,.0f} | {speed / plain:.2f}x | {speed / speeds[best]:.2f}x | {' | '.join(shown)} |")
    never, fixed = speeds[f"head that never stops, K={NEVER}"], speeds[f"fixed K={NEVER}"]
    print(f"\nA head that never stops, beside the fixed length: {100 * (fixed / never - 1):+.1f} % time per token.\n")


STAGES = ("draft", "verify", "commit")


def median_seconds(work: Callable[[], object], device: torch.device, times: int = 50) -> float:
    """Return the median time of `work` after a warm-up."""
    taken = []
    for turn in range(times + 5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 5:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(2**26, device=device)
    copied = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: copied.copy_(source), device, 20)


def bytes_read(lm: LanguageModel, engine: Engine, context: int) -> int:
    """Return the bytes of weights and of KV memory that a forward over one token needs at `context` positions."""
    table = lm.model.get_input_embeddings().weight
    tied = table is lm.output_embedding.weight
    weights = sum(weight.nbytes for weight in lm.model.parameters()) - (0 if tied else table.nbytes)
    return weights + sum(kv[:, :, :context].nbytes for layer in engine._layers for kv in (layer.keys, layer.values))


def print_forwards(pair: Pair, head: AcceptanceHead, warp: Warp, engine: str) -> None:
    """Time single units at a context of 256 positions."""
    decoder = SpeculativeDecoder(pair, stopping=HeadThreshold(head), warp=warp, engine=engine)
    plain, target = decoder.with_stopping(FixedLength(8)), Baseline(pair, warp, decoder.target_engine)
    for one in (decoder, plain, target):
        one.warm_up()
    device, context = pair.target_lm.device, 256
    uniform, ends = (
        torch.zeros(1, dtype=torch.float64, device=device),
        torch.zeros(pair.vocab_size, dtype=torch.bool, device=device),
    )
    token = torch.zeros(1, 1, dtype=torch.long, device=device)

    def step(one: SpeculativeDecoder) -> Callable[[], object]:
        state = one.stopping.init(1, device)
        return lambda: (place(one.draft_engine, context), one._drafter._step(token, uniform, ends, state))

    def verify(count: int) -> Callable[[], object]:
        inputs = (decoder._draft_probs, decoder._draws, uniform, decoder._num_drafted)
        tokens = decoder._tokens[:, : decoder.target_engine.padded(count)]
        return lambda: (place(decoder.target_engine, context), decoder._verify_unit(tokens, *inputs))

    limit = bandwidth(device)
    print(f"memory bandwidth, measured by a large copy: {limit / 1e9:,.1f} GB/s; context {context}; sampled\n")
    print("| unit | ms | MB that must be read | read at, of the copy's bandwidth |\n|---|---|---|---|")
    alone = lambda: (place(decoder.target_engine, context), target._unit(token, uniform))
    lines = [("target alone", alone, pair.target_lm, decoder.target_engine)]
    lines += [("draft step, fixed length", step(plain), pair.draft_lm, decoder.draft_engine)]
    lines += [("draft step with head", step(decoder), pair.draft_lm, decoder.draft_engine)]
    lines += [(f"verification of {k}", verify(k + 1), pair.target_lm, decoder.target_engine) for k in (2, 4, 8)]
    for name, work, lm, memory in lines:
        seconds, size = median_seconds(work, device), bytes_read(lm, memory, context)
        print(f"| {name} | {1e3 * seconds:.3f} | {size / 1e6:,.1f} | {100 * size / seconds / limit:.0f} % |")
    print()


def place(engine: Engine, length: int) -> None:
    """Pretend that `length` positions are in memory."""
    for layer in engine._layers:
        layer.length = length


def print_contexts(pair: Pair, head: AcceptanceHead, warp: Warp, engine: str, text: list[int], length: int, repeats: int) -> None:
    """Time per token behind contexts of several lengths, the prompt itself not counted."""
    decoder = SpeculativeDecoder(pair, stopping=HeadThreshold(head, 0.5), warp=warp, engine=engine)
    ways = {"target alone": Baseline(pair, warp, decoder.target_engine), "head 0.5": decoder}
    print("| context | " + " | ".join(f"{name}, ms per token" for name in ways) + " |\n|---|---|---|")
    for context in CONTEXTS:
        size = min(context, pair.window) - length
        prompt = (text * (1 + size // len(text)))[:size]
        taken = {name: [] for name in ways}
        for repeat in range(repeats + 1):
            for name, way in ways.items():
                out = way.generate(prompt, length, seed=repeat, stop_tokens=()).stats
                taken[name].append(1e3 * (out.seconds - out.prefill_seconds) / out.num_tokens)
        print(f"| {size} | " + " | ".join(f"{statistics.median(values[1:]):.2f}" for values in taken.values()) + " |")
    print()


def print_head_share() -> None:
    """Count the multiply-adds (as many as weights, at one token) of heads beside a forward of Llama-2-7B."""
    with torch.device("meta"):
        draft = LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, vocab_size=32000))
        weights = sum(w.numel() for w in draft.parameters()) - draft.get_input_embeddings().weight.numel()
        for judges in ("next_token", "input_token"):
            head = AcceptanceHead(HeadConfig(4096, embedding_size=4096, judges=judges))
            share = sum(w.numel() for w in head.parameters()) / weights
            print(
                f"{judges} head beside a Llama-2-7B step: {100 * share:.2f} % of the multiply-adds; in float32 beside bfloat16,",
                end=" ",
            )
            print(f"{200 * share:.2f} % of the bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", required=True, help="a folder that train.py exported")
    parser.add_argument("--model", default="nano", help="a file of conf/model")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    pair, head = load_pair(arguments.model), load_head(arguments.head)
    prompts = [pair.encode_instruction(p.text) for p in NanoSource(arguments.prompts, 0, 0).load(pair.chats)]
    where = torch.cuda.get_device_name() if pair.target_lm.device.type == "cuda" else f"{platform.machine()} CPU"
    print(f"{pair.name}, {len(prompts)} prompts, at most {arguments.new_tokens} tokens, {arguments.repeats} repeats,", end=" ")
    print(f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    for warp in (Warp(temperature=0), Warp(temperature=1.0, top_k=50)):
        mode = "greedy" if warp.greedy else "sampled at temperature 1, top-k 50"
        own, startup = own_runs(pair, head, warp, arguments.new_tokens, arguments.engine)
        print(f"## {mode}; start-up of all settings {startup:.1f} s\n")
        runs = {**transformers_runs(pair, warp, arguments.new_tokens), **own}
        print_speeds(*compare(runs, prompts, arguments.repeats))
    print_forwards(pair, head, warp, arguments.engine)
    text = [token for prompt in prompts for token in prompt]
    print_contexts(pair, head, warp, arguments.engine, text, 64, arguments.repeats)
    print_head_share()


if __name__ == "__main__":
    main()
