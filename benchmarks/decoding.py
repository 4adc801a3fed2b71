"""How fast is decoding next to the peers, transformers, llama.cpp and vLLM, on the same weights?

    python benchmarks/decoding.py [--model nano] [--data NAME[=FILE] ...] [--modes MODE ...]
        [--head FOLDER] [--vllm-python PYTHON] [--prompts 8] [--repeats 5] [--keep]

Each peer is a process, or several, with the same number of threads. One process runs at a time, all
others are stopped; in each repeat all settings decode the same prompts one after another, each
after the first prompt, which is not counted. Where a peer has several settings (drafted tokens per
round, a threshold), the fastest on other prompts is reported. Responses have the same number of
tokens everywhere: no token ends them. Seconds are those of whole calls.

A peer that is not installed is left out. llama.cpp computes with weights of few bits and
activations of eight, so that its responses may depart from those of the others.
Batches are timed by `specheads evaluate concurrency=`, the steps of decoding by benchmarks.gpu.
"""

import argparse
import statistics
import sys
import tempfile
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gguf_file import write_gguf
from benchmarks.peer_workers.processes import Answer, PeerCommand, Workers, can_import
from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from specheads import Warp, load_pair
from specheads.commands.evaluate import named_test_sets
from specheads.pair.locations import unabbreviated
from specheads.pair.pair import Pair
from specheads.pair.revisions import gguf_file
from specheads.prompts.prompt import FINAL, Prompt, ids_hash
from specheads.prompts.sources import NanoSource

MODES = {
    "greedy": ("Greedy", Warp(temperature=0)),
    "sampled": ("Sampled at temperature 1, top-k 50", Warp(top_k=50)),
    "low": ("Sampled at temperature 0.2, top-p 0.9", Warp(temperature=0.2, top_p=0.9)),
}
TRANSFORMERS = "transformers"
OURS = "this decoder"
ALONE = "alone"
VLLM = "vLLM"
LLAMA = "llama.cpp"
LENGTHS = (1, 2, 3, 4, 6, 8)  # drafted tokens per round
VLLM_LENGTHS = (1, 2, 3, 4, 6)  # each is a process
NANO = "nano"
FINAL_PARTS = (8, 9)  # of the final prompts, 200 together
LOOKED_UP = (2, 4, 8)  # tokens that transformers copies from the prompt per round
WINDOW = 1024  # positions that vLLM and llama.cpp have memory for
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)
VLLM_THRESHOLDS = (0.3, 0.5, 0.7)
TUNING_REPEATS = 2
LONGEST = 12
COLUMNS = [
    Column("setting"),
    Column("tokens/s", "fixed:0"),
    Column("slowest", "fixed:0"),
    Column("fastest", "fixed:0"),
    Column("over transformers", "ratio"),
    Column("over its target alone", "ratio"),
    Column("tokens as alone", "percent:1"),
    Column("tokens per round", "fixed"),
    Column("draft", "ms"),
    Column("verify", "ms"),
    Column("commit", "ms"),
]
Options = Mapping[str, object]


@dataclass(frozen=True)
class Setting:
    """One way to decode, by a process with the options of each request.

    Of the settings of a peer with the same way, the fastest on the tuning prompts is reported.
    """

    peer: str
    way: str
    choice: str  # among the settings of the way; empty where there is only one
    worker: PeerCommand
    options: Options = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the tables call it."""
        return ", ".join(part for part in (self.peer, self.way, self.choice) if part)


@dataclass
class Timed:
    """What a setting made: tokens per second of each repeat, the responses of the first, and totals
    over rounds where known.
    """

    speeds: list[float] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    totals: Counter = field(default_factory=Counter)  # tokens, rounds, and seconds of their stages

    @property
    def speed(self) -> float:
        """Tokens per second, the median over repeats."""
        return statistics.median(self.speeds)


def main() -> None:
    given = _parsed_arguments()
    torch.set_num_threads(given.threads)
    pair = load_pair(given.model, device="cpu")
    sets = dict(prompts_of(name, given.prompts, pair) for name in given.data)
    share = -(-given.prompts // len(sets))
    tuning = [prompt for prompts in sets.values() for prompt in prompts[:share]]
    tables = []
    versions = dict[str, str]()
    for mode in given.modes:
        title, warp = MODES[mode]
        with tempfile.TemporaryDirectory() as folder, Workers() as workers:
            settings = list(all_settings(pair, given, warp, Path(folder)))
            chosen = fastest(workers, settings, encoded(pair, tuning), given.new_tokens)
            for name, prompts in sets.items():
                reported = encoded(pair, prompts[given.prompts :])
                measured = measure(workers, chosen, reported, given.new_tokens, given.repeats)
                shown = title if len(sets) == 1 else f"{title}: {name}"
                table = _speed_table(chosen, measured, f"{mode}_{name}", shown)
                tables.append(table)
                print(f"\n{table.title}\n\n{text_of(table)}", flush=True)
            versions |= workers.versions
    shown = ", ".join(f"{name} {each}" for name, each in versions.items())
    about = (
        f"{pair.name} in {_dtype(pair)}, {given.new_tokens} tokens, medians of {given.repeats}"
        f" repeats. {shown}."
    )
    every = (prompt.prompt_id for prompts in sets.values() for prompt in prompts)
    split = FINAL if given.data == [NANO] else "test"
    write_result(
        "decoding", tables, given.keep, notes=[about], split=split, prompts=ids_hash(every)
    )


def prompts_of(named: str, count: int, pair: Pair) -> tuple[str, list[Prompt]]:
    """Return the name of a prompt set and 2 `count` of its prompts, which no head or draft was
    trained on: NAME, or NAME=FILE for a file of rows of that set of conf/data.
    """
    name, _, file = named.partition("=")
    if name == NANO:
        return name, list(NanoSource(0, count, 0, count, FINAL_PARTS).load(pair.chats))
    [test_set] = (named_test_sets({name: file or None}, 2 * count) or {}).values()
    prompts = [prompt for prompt in test_set.source.load(pair.chats) if prompt.split == "test"]
    return name, prompts[: 2 * count]


def encoded(pair: Pair, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of prompts."""
    return [pair.encode_instruction(prompt.text) for prompt in prompts]


def _parsed_arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="nano", help="a file of conf/model")
    add("--data", nargs="+", default=[NANO], help="prompt sets of conf/data, NAME or NAME=FILE")
    add("--modes", nargs="+", choices=MODES, default=["greedy", "sampled"])
    add("--head", help="a folder that specheads train exported")
    add("--engine", default="auto", help="of this decoder")
    add("--threads", type=int, default=torch.get_num_threads(), help="of every process")
    add("--vllm-python", default=sys.executable, help="an interpreter with vLLM")
    add("--prompts", type=int, default=8, help="reported ones; as many others choose the settings")
    add("--new-tokens", type=int, default=128)
    add("--repeats", type=int, default=5)
    add_keep_option(parser, "decoding")
    return parser.parse_args()


def _dtype(pair: Pair) -> str:
    return str(pair.target.dtype).removeprefix("torch.")


# --- what can be compared


def all_settings(pair: Pair, given: Namespace, warp: Warp, folder: Path) -> Iterator[Setting]:
    """Yield everything that can be compared here.

    Files that vLLM reads are written to `folder`.
    """
    head = str(Path(given.head).resolve()) if given.head else None
    setup = {"threads": given.threads, "warp": asdict(warp), "head": head}
    local = setup | {"model": given.model, "engine": given.engine}
    yield from _of_transformers(local)
    yield from _of_this_project(local)
    if pair.target.config.model_type == "llama" and can_import(sys.executable, "xllamacpp"):
        yield from _of_llama(pair, setup, folder)
    if can_import(given.vllm_python, "vllm"):
        yield from _of_vllm(pair, setup, given.vllm_python, folder)


def _of_transformers(setup: Options) -> Iterator[Setting]:
    """Yield transformers' generation: alone, assisted, and with the head."""
    command = PeerCommand(sys.executable, "local_worker.py", {**setup, "peer": TRANSFORMERS})
    yield Setting(TRANSFORMERS, ALONE, "", command)
    assisted = {f"K={length}": _assistant(length) for length in LENGTHS}
    assisted["confidence 0.4"] = _assistant(20, confidence=0.4)
    for choice, options in assisted.items():
        yield Setting(TRANSFORMERS, "assisted", choice, command, options)
    for length in LOOKED_UP:
        options = {"prompt_lookup_num_tokens": length}
        yield Setting(TRANSFORMERS, "prompt lookup", f"K={length}", command, options)
    for value in THRESHOLDS if setup["head"] else ():
        options = _assistant(20) | {"threshold": value}
        yield Setting(
            TRANSFORMERS, "assisted with the head", f"threshold {value}", command, options
        )


def _assistant(tokens: int, confidence: float = 0.0) -> dict[str, object]:
    """Return settings of the draft in transformers' assisted generation."""
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": confidence,
    }


def _of_this_project(setup: Options) -> Iterator[Setting]:
    """Yield this project's decoders: alone, with fixed lengths, and with the head."""
    command = PeerCommand(sys.executable, "local_worker.py", {**setup, "peer": OURS})
    yield Setting(OURS, ALONE, "", command, {"rule": ALONE})
    verifications = {"": False}
    if setup["warp"]["temperature"]:
        verifications[", block verification"] = True
    for name, block in verifications.items():
        for length in LENGTHS:
            options = {"rule": "fixed", "value": length, "block": block}
            yield Setting(OURS, f"fixed length{name}", f"K={length}", command, options)
        for value in THRESHOLDS if setup["head"] else ():
            options = {"rule": "head", "value": value, "block": block}
            yield Setting(OURS, f"head{name}", f"threshold {value}", command, options)


def _of_llama(pair: Pair, setup: Options, folder: Path) -> Iterator[Setting]:
    """Yield llama.cpp, alone and with the draft in 8 bits: on the target's GGUF file, if it is one,
    and in float16.

    Each setting is a process.
    """
    source = gguf_file(unabbreviated(pair.target_id))
    files = {"F16": folder / "target-F16.gguf"}
    write_gguf(pair.target, files["F16"], "F16", source)
    if source:
        files[source.stem.rpartition(".")[2]] = source
    draft_file = folder / "draft.gguf"
    write_gguf(pair.draft, draft_file, "Q8_0", source)
    window = min(pair.window, WINDOW)
    common = {**setup, "draft_file": str(draft_file), "window": window}
    for form, file in files.items():
        peer = f"{LLAMA} {form}"
        for drafted in (0, *LENGTHS):
            started = common | {"file": str(file), "drafted": drafted}
            command = PeerCommand(sys.executable, "llama_worker.py", started)
            way, choice = ("draft model", f"K={drafted}") if drafted else (ALONE, "")
            yield Setting(peer, way, choice, command)


def _of_vllm(pair: Pair, setup: Options, python: str, folder: Path) -> Iterator[Setting]:
    """Yield vLLM in its environment: alone, with its draft model, and with the head on that.

    Each setting is a process.
    """
    folders = {"folder": str(folder / "target"), "draft_folder": str(folder / "draft")}
    for model, path in zip((pair.target, pair.draft), folders.values(), strict=True):
        model.save_pretrained(path)
        pair.tokenizer.save_pretrained(path)
    common = {**setup, **folders, "dtype": _dtype(pair), "window": min(pair.window, WINDOW)}

    def started(**options: object) -> PeerCommand:
        return PeerCommand(python, "vllm_worker.py", common | options)

    yield Setting(VLLM, ALONE, "", started(drafted=0))
    for length in VLLM_LENGTHS:
        yield Setting(VLLM, "draft model", f"K={length}", started(drafted=length))
    by_head = {f"threshold {value}": value for value in VLLM_THRESHOLDS}
    for choice, value in {**by_head, "by measured times": None}.items() if setup["head"] else ():
        command = started(drafted=LONGEST, threshold=value)
        yield Setting(VLLM, "head on the draft model", choice, command)


# --- how it is compared


def fastest(
    workers: Workers, settings: Sequence[Setting], prompts: Sequence[list[int]], length: int
) -> list[Setting]:
    """Return the fastest setting of each way of each peer."""
    ways: dict[tuple[str, str], list[Setting]] = {}
    for setting in settings:
        ways.setdefault((setting.peer, setting.way), []).append(setting)
    chosen = []
    for group in ways.values():
        best = group[0]
        if len(group) > 1:
            measured = measure(workers, group, prompts, length, TUNING_REPEATS)
            for setting in group:
                speed = measured[setting.name].speed
                print(f"    tuning: {setting.name}: {speed:,.0f} tokens/s", file=sys.stderr)
                if speed > measured[best.name].speed:
                    best = setting
        chosen.append(best)
    return chosen


def measure(
    workers: Workers,
    settings: Sequence[Setting],
    prompts: Sequence[list[int]],
    length: int,
    repeats: int,
) -> dict[str, Timed]:
    """Return what every setting made of the prompts, repeat by repeat in turn."""
    measured = defaultdict[str, Timed](Timed)
    order = list(settings)
    for repeat in range(repeats):
        for setting in order:
            made = measured[setting.name]
            _ask(workers, setting, prompts[0], length, 1000 * repeat)  # not counted
            seconds = 0.0
            for seed, prompt in enumerate(prompts, 1000 * repeat):
                answer = _ask(workers, setting, prompt, length, seed)
                seconds += answer["seconds"]
                made.totals.update(answer.get("totals", {}))
                if not repeat:
                    made.responses.append(answer["response"])
            made.speeds.append(length * len(prompts) / seconds)
        order = [*order[1:], order[0]]
    return measured


def _ask(workers: Workers, setting: Setting, prompt: list[int], length: int, seed: int) -> Answer:
    """Return a worker's answer. Raises ValueError where a response has another length."""
    request = {"options": setting.options, "prompt": prompt, "length": length, "seed": seed}
    answer = workers.ask(setting.worker, request)
    if len(answer["response"]) != length:
        raise ValueError(f"{setting.name}: {len(answer['response'])} tokens, not {length}")
    return answer


def _speed_table(
    chosen: Sequence[Setting], measured: Mapping[str, Timed], name: str, title: str
) -> Table:
    """Return how fast each setting is, and in greedy decoding how many of its tokens are those of
    the target alone.
    """
    alone = {setting.peer: measured[setting.name] for setting in chosen if setting.way == ALONE}
    rows: list[list[Value]] = []
    for setting in chosen:
        made = measured[setting.name]
        row: list[Value] = [setting.name, made.speed, min(made.speeds), max(made.speeds)]
        row.append(made.speed / alone[TRANSFORMERS].speed if TRANSFORMERS in alone else None)
        row.append(made.speed / alone[setting.peer].speed)
        reference = alone.get(OURS, alone[setting.peer])
        row.append(_same_tokens(made, reference) if name.startswith("greedy") else None)
        for column in ("tokens", "draft", "verify", "commit"):
            rounds = made.totals["rounds"]
            row.append(made.totals[column] / rounds if rounds else None)
        rows.append(row)
    return Table(name, title, COLUMNS, rows)


def _same_tokens(made: Timed, alone: Timed) -> float:
    """Return the share of tokens before the first that differs: float sums in another order may
    swap two near equals.
    """
    counted = 0
    shared = 0
    for ours, theirs in zip(alone.responses, made.responses, strict=True):
        counted += len(ours)
        for our_token, their_token in zip(ours, theirs, strict=True):
            if our_token != their_token:
                break
            shared += 1
    return shared / counted


if __name__ == "__main__":
    main()
