"""How fast is decoding next to the peers: transformers, llama.cpp and vLLM, on the same weights?

    python benchmarks/peers.py [--model nano] [--dtype float32] [--head outputs/head/<date_time>/heads/<name>]
        [--llama-bin FOLDER] [--vllm-python PYTHON] [--prompts 8] [--repeats 5]

Everything runs on the CPU, each peer in a process of its own, with the same number of threads. One process runs at a time, all
others stand still; in each repeat all settings decode the same prompts in turn. Before its turn counts, a setting decodes the
first prompt once. Where a peer has several settings (drafted tokens per round, a threshold), the fastest on other prompts is
reported. Responses have the same number of tokens everywhere: no token ends them. Seconds are those of whole calls.

A peer that is not installed is left out, with a line that says how to get it.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gguf_file import obstacle, write_gguf
from benchmarks.peer_workers.processes import Command, Workers, can_import
from benchmarks.results import Column, Table, Value, add_keep_option, prompt_record, text_of, write_result
from specheads import load_pair
from specheads.pair.pair import Pair
from specheads.prompts.sources import NanoSource

PLAIN, ALONE = "transformers, plain", "this decoder, alone"
LENGTHS, VLLM_LENGTHS = (1, 2, 3, 4, 6, 8), (2, 3, 4, 6)  # drafted tokens per round; with vLLM each is a process of its own
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)


@dataclass(frozen=True)
class Setting:
    """One way to decode. Of the settings of a line, the fastest on the tuning prompts is reported."""

    line: str
    choice: str  # among the settings of the line; empty where there is only one
    worker: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sampled_only: bool = False

    @property
    def name(self) -> str:
        """What the tables call it."""
        return f"{self.line}, {self.choice}" if self.choice else self.line


@dataclass
class _Peers:
    """The commands of all workers by name, the settings, and why peers are left out."""

    commands: dict[str, Command] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, worker: str, command: Command, *settings: Setting) -> None:
        """Add a process and what it can do."""
        self.commands[worker] = command
        self.settings += settings


@dataclass
class Measured:
    """What a setting made in each repeat, and its responses of the first."""

    speeds: list[float]
    responses: list[list[int]]

    @property
    def speed(self) -> float:
        """Tokens per second, the median over repeats."""
        return statistics.median(self.speeds)


def main() -> None:
    given = _parsed_arguments()
    torch.set_num_threads(given.threads)
    pair = load_pair(given.model, **pair_keys(given))
    loaded = list(NanoSource(2 * given.prompts, 0, 0).load(pair.chats))
    parts = {"reported": loaded[: given.prompts], "tuning": loaded[given.prompts :]}
    reported, tuning = ([pair.encode_instruction(prompt.text) for prompt in part] for part in parts.values())
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        peers = all_peers(pair, given, Path(folder))
        print(*peers.left_out, sep="\n", file=sys.stderr)
        with Workers(peers.commands) as workers:
            for greedy in (True, False):
                possible = [setting for setting in peers.settings if not (greedy and setting.sampled_only)]
                chosen = fastest(workers, possible, greedy, tuning, given.new_tokens, 2)
                workers.keep([setting.worker for setting in chosen])
                measured = measure(workers, chosen, greedy, reported, given.new_tokens, given.repeats)
                tables.append(speed_table(measured, greedy))
                print(f"\n{tables[-1].title}\n\n{text_of(tables[-1])}", flush=True)
    dtype = str(pair.target.dtype).removeprefix("torch.")
    versions = ", ".join(f"{name} {version}" for name, version in workers.versions.items())
    notes = [f"{pair.name} in {dtype}, {given.new_tokens} tokens, medians of {given.repeats} repeats. {versions}."]
    notes += [*sorted({f"{line}." for line in workers.warnings}), *peers.left_out]
    read = {name: prompt_record(each.prompt_id for each in part) for name, part in parts.items()}
    seeds = [1000 * repeat for repeat in range(given.repeats)]
    write_result("peers", tables, split="train", seeds=seeds, prompts=read, notes=notes, keep=given.keep)


def _parsed_arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="a file of conf/model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: that of the model's config")
    parser.add_argument("--head", help="a folder that specheads train exported")
    parser.add_argument("--engine", default="auto", help="of this decoder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every process")
    parser.add_argument("--llama-bin", help="the folder of llama-server; default: that of PATH")
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument("--window", type=int, default=1024, help="positions that peers have memory for")
    parser.add_argument("--prompts", type=int, default=8, help="that are reported; as many others choose the settings")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    add_keep_option(parser, "peers")
    return parser.parse_args()


# --- what can be compared


def all_peers(pair: Pair, given: Namespace, folder: Path) -> _Peers:
    """Return everything that can be compared here; files that peers read are written to `folder`."""
    peers = _Peers()
    setup = {"model": given.model, "pair_keys": pair_keys(given), "threads": given.threads}
    _add_transformers(peers, setup)
    setup |= {"dtype": str(pair.target.dtype).removeprefix("torch."), "window": min(pair.window, given.window)}
    _add_llama(peers, pair, setup, given, folder)
    _add_vllm(peers, pair, setup, given, folder)
    _add_specheads(peers, setup | {"engine": given.engine, "head": given.head})
    return peers


def pair_keys(given: Namespace) -> dict[str, str]:
    """Return what is loaded differently from the model's config."""
    return {"device": "cpu"} | ({"dtype": given.dtype} if given.dtype else {})


def assisted(lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the ways of transformers' assisted generation: fixed lengths, its heuristic, and its bound on the confidence."""

    def settings(tokens: int, schedule: str = "constant", confidence: float = 0.0) -> dict[str, Any]:
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        return dict(zip(names, (tokens, schedule, confidence), strict=True))

    fixed = {f"K={length}": settings(length) for length in lengths}
    return fixed | {"heuristic": settings(5, "heuristic"), "confidence 0.4": settings(20, confidence=0.4)}


def _add_transformers(peers: _Peers, setup: Mapping[str, Any]) -> None:
    """Add transformers' generation."""
    ways = [Setting("transformers, assisted", name, "transformers", options) for name, options in assisted(LENGTHS).items()]
    command = Command(sys.executable, "local_worker.py", {**setup, "peer": "transformers"})
    peers.add("transformers", command, Setting(PLAIN, "", "transformers"), *ways)


def _add_llama(peers: _Peers, pair: Pair, setup: Mapping[str, Any], given: Namespace, folder: Path) -> None:
    """Add llama.cpp's server with and without a draft model."""
    if reason := obstacle(pair.target) or obstacle(pair.draft):
        peers.left_out.append(f"llama.cpp is left out: {pair.name} has a model that cannot be written as GGUF: {reason}.")
        return
    binary = shutil.which("llama-server", path=given.llama_bin)
    if not (binary and can_import(sys.executable, "gguf")):
        peers.left_out.append(
            "llama.cpp is left out: build llama-server (docs/measurements/speed.md), name its folder by --llama-bin, and "
            'pip install "specheads[bench]", which brings gguf.'
        )
        return
    files = {"file": folder / "target.gguf", "draft_file": folder / "draft.gguf"}
    for model, path in zip((pair.target, pair.draft), files.values(), strict=True):
        write_gguf(model, path)
    setup = {**setup, **{name: str(path) for name, path in files.items()}, "binary": str(Path(binary).resolve())}
    # On a CPU it computes in half precision: it moves nano's logits by 0.015, all else in float32 by 0.00001.
    setup["flash_attention"] = setup["dtype"] != "float32"
    _add_by_length(peers, "llama.cpp", Command(sys.executable, "llama_worker.py", setup), LENGTHS)


def _add_vllm(peers: _Peers, pair: Pair, setup: Mapping[str, Any], given: Namespace, folder: Path) -> None:
    """Add vLLM from its environment."""
    if not can_import(given.vllm_python, "vllm"):
        peers.left_out.append(
            "vLLM is left out: it needs an environment of its own (docs/measurements/speed.md); --vllm-python names it."
        )
        return
    command = Command(given.vllm_python, "vllm_worker.py", {**setup, **saved(pair, folder), "compiled": True})
    _add_by_length(peers, "vLLM", command, VLLM_LENGTHS)


def saved(pair: Pair, folder: Path) -> dict[str, str]:
    """Write both models into folders and return what their names are for vLLM's worker."""
    folders = {"folder": folder / "target", "draft_folder": folder / "draft"}
    for model, path in zip((pair.target, pair.draft), folders.values(), strict=True):
        model.save_pretrained(path)
        pair.tokenizer.save_pretrained(path)
    return {name: str(path) for name, path in folders.items()}


def _add_by_length(peers: _Peers, name: str, command: Command, lengths: Sequence[int]) -> None:
    """Add a peer alone and with drafts of its draft model, one process for each length."""
    for length in (0, *lengths):
        worker, line = f"{name} {length}", f"{name}, draft model" if length else f"{name}, plain"
        drafting = Command(command.python, command.file, {**command.setup, "drafted": length})
        peers.add(worker, drafting, Setting(line, f"K={length}" if length else "", worker))


def _add_specheads(peers: _Peers, setup: Mapping[str, Any]) -> None:
    """Add this project's decoders."""
    settings = [Setting(ALONE, "", "specheads", {"rule": "alone"})]
    rules = {
        "this decoder, fixed length": {f"K={length}": {"rule": "fixed", "length": length} for length in LENGTHS},
        "this decoder, head": {f"threshold {value}": {"rule": "head", "threshold": value} for value in THRESHOLDS},
    }
    if not setup["head"]:
        peers.left_out.append("the head is left out: --head names one that specheads train exported.")
        del rules["this decoder, head"]
    for line, choices in rules.items():
        for choice, options in choices.items():
            settings.append(Setting(line, choice, "specheads", options))
            block = options | {"verification": "block"}
            settings.append(Setting(f"{line}, block verification", choice, "specheads", block, sampled_only=True))
    peers.add("specheads", Command(sys.executable, "local_worker.py", {**setup, "peer": "specheads"}), *settings)


# --- how it is compared


def fastest(
    workers: Workers, settings: Sequence[Setting], greedy: bool, prompts: Sequence[list[int]], length: int, repeats: int
) -> list[Setting]:
    """Return the fastest setting of each line."""
    count = Counter(setting.line for setting in settings)
    several = [setting for setting in settings if count[setting.line] > 1]
    measured = measure(workers, several, greedy, prompts, length, repeats) if several else {}
    for name, made in measured.items():
        print(f"    tuning: {name}: {made.speed:,.0f} tokens/s", file=sys.stderr, flush=True)
    return best_of_lines(settings, {name: made.speed for name, made in measured.items()})


def best_of_lines(settings: Sequence[Setting], speeds: Mapping[str, float]) -> list[Setting]:
    """Return the fastest setting of each line, by the speeds of their names."""
    best: dict[str, Setting] = {}
    for setting in settings:
        before = best.get(setting.line)
        if before is None or speeds[setting.name] > speeds[before.name]:
            best[setting.line] = setting
    return list(best.values())


def measure(
    workers: Workers, settings: Sequence[Setting], greedy: bool, prompts: Sequence[list[int]], length: int, repeats: int
) -> dict[str, Measured]:
    """Return what every setting made of the prompts, repeat by repeat in turn."""
    measured = {setting.name: Measured([], []) for setting in settings}
    for repeat in range(repeats):
        first = repeat % len(settings)
        for setting in (*settings[first:], *settings[:first]):
            seeds = [0, *(1000 * repeat + number for number in range(len(prompts)))]
            request = {"do": "generate", "options": setting.options, "greedy": greedy, "length": length}
            answer = workers.ask(setting.worker, request | {"prompts": [prompts[0], *prompts], "seeds": seeds})
            responses, seconds = answer["responses"][1:], answer["seconds"][1:]
            if wrong := [len(response) for response in responses if len(response) != length]:
                raise ValueError(f"{setting.name} made {wrong[0]} tokens, not {length}")
            measured[setting.name].speeds.append(length * len(prompts) / sum(seconds))
            measured[setting.name].responses = measured[setting.name].responses or responses
    return measured


def speed_table(measured: Mapping[str, Measured], greedy: bool) -> Table:
    """Return how fast each setting is, and in greedy decoding how many of its tokens are those of the target alone."""
    plain, alone = measured[PLAIN].speed, measured[ALONE].speed
    rows: list[list[Value]] = []
    for name, made in measured.items():
        row: list[Value] = [name, made.speed, min(made.speeds), max(made.speeds), made.speed / plain, made.speed / alone]
        rows.append([*row, same_tokens(made, measured[ALONE])] if greedy else row)
    columns = [Column("setting"), *(Column(name, "fixed:0") for name in ("tokens/s", "slowest", "fastest"))]
    columns += [Column("over transformers", "ratio"), Column("over this decoder alone", "ratio")]
    if greedy:
        return Table("greedy", "Greedy", [*columns, Column("tokens as alone", "percent:1")], rows)
    return Table("sampled", "Sampled at temperature 1, top-k 50", columns, rows)


def same_tokens(made: Measured, alone: Measured) -> float:
    """Return the share of tokens before the first that differs: float sums in another order may swap two near equals."""
    counted = shared = 0
    for ours, theirs in zip(alone.responses, made.responses, strict=True):
        counted += len(ours)
        shared += next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    return shared / counted


if __name__ == "__main__":
    main()
