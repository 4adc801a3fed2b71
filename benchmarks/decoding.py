"""How fast is decoding next to the peers, transformers and vLLM, on the same weights?

    python benchmarks/decoding.py [--model nano] [--head FOLDER] [--vllm-python PYTHON]
        [--prompts 8] [--repeats 5]

Each peer is a process, or several, with the same number of threads. One process runs at a time, all
others are stopped; in each repeat all settings decode the same prompts one after another, each
after the first prompt, which is not counted. Where a peer has several settings (drafted tokens per
round, a threshold), the fastest on other prompts is reported. Responses have the same number of
tokens everywhere: no token ends them. Seconds are those of whole calls.

A peer that is not installed, or that needs another draft, is left out, with a line that says why.
Batches are timed by `specheads evaluate concurrency=`, the steps of decoding by benchmarks.gpu.
"""

import argparse
import statistics
import sys
import tempfile
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_workers.processes import Answer, PeerCommand, Workers, can_import
from benchmarks.results import (
    Column,
    Table,
    Value,
    add_keep_option,
    prompt_record,
    text_of,
    write_result,
)
from specheads import Warp, load_pair
from specheads.pair.draft_vocabulary import kept_tokens
from specheads.pair.pair import Pair
from specheads.prompts.prompt import FINAL
from specheads.prompts.sources import NanoSource

MODES = {
    "greedy": ("Greedy", Warp(temperature=0)),
    "sampled": ("Sampled at temperature 1, top-k 50", Warp(top_k=50)),
}
TRANSFORMERS = "transformers"
OURS = "this decoder"
ALONE = "alone"
VLLM = "vLLM"
PEERS = (TRANSFORMERS, OURS, VLLM)
LENGTHS = (1, 2, 3, 4, 6, 8)  # drafted tokens per round
VLLM_LENGTHS = (1, 2, 3, 4, 6)  # each is a process
FINAL_PARTS = (8, 9)  # of the final prompts, 200 together
WINDOW = 1024  # positions that vLLM has memory for
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
    """One way to decode.

    Of the settings of a peer with the same way, the fastest on the tuning prompts is reported.
    """

    peer: str
    way: str
    choice: str = ""  # among the settings of the way; empty where there is only one
    worker: str = ""
    options: Options = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the tables call it."""
        return ", ".join(part for part in (self.peer, self.way, self.choice) if part)


@dataclass
class _Peers:
    """The commands of all workers by name, the settings, and why peers are left out."""

    commands: dict[str, PeerCommand] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(
        self, peer: str, way: str, choices: Mapping[str, Options], command: PeerCommand
    ) -> None:
        """Add a way to decode, by name the options of its choices.

        One process takes them with each request; those of vLLM start a process each.
        """
        for choice, options in choices.items():
            setting = Setting(peer, way, choice, peer, options)
            if peer == VLLM:
                setting = Setting(peer, way, choice, f"{peer}, {way}, {choice}")
                self.commands[setting.worker] = replace(command, setup={**command.setup, **options})
            else:
                self.commands[peer] = command
            self.settings.append(setting)


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
    count = given.prompts
    loaded = list(NanoSource(0, count, 0, count, FINAL_PARTS).load(pair.chats))
    encoded = [pair.encode_instruction(prompt.text) for prompt in loaded]
    prompt_ids = [prompt.prompt_id for prompt in loaded]
    tables = []
    notes = dict[str, None]()
    versions = dict[str, str]()
    for mode in given.modes:
        with tempfile.TemporaryDirectory() as folder:
            peers = _all_peers(pair, given, MODES[mode][1], Path(folder))
            print(*peers.left_out, sep="\n", file=sys.stderr)
            with Workers(peers.commands) as workers:
                chosen = fastest(workers, peers.settings, encoded[:count], given.new_tokens)
                measured = measure(
                    workers, chosen, encoded[count:], given.new_tokens, given.repeats
                )
        table = _speed_table(chosen, measured, mode)
        tables.append(table)
        print(f"\n{table.title}\n\n{text_of(table)}", flush=True)
        versions |= workers.versions
        notes |= dict.fromkeys([*sorted(f"{line}." for line in workers.warnings), *peers.left_out])
    dtype = str(pair.target.dtype).removeprefix("torch.")
    shown = ", ".join(f"{name} {each}" for name, each in versions.items())
    about = (
        f"{pair.name} in {dtype}, {given.new_tokens} tokens, medians of {given.repeats} repeats."
        f" {shown}."
    )
    write_result(
        "decoding",
        tables,
        split=FINAL,
        seeds=range(0, 1000 * given.repeats, 1000),
        prompts={
            "tuning": prompt_record(prompt_ids[:count]),
            "reported": prompt_record(prompt_ids[count:]),
        },
        notes=[about, *notes],
        keep=given.keep,
    )


def _parsed_arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="nano", help="a file of conf/model")
    add("--modes", nargs="+", choices=MODES, default=["greedy", "sampled"])
    add("--head", help="a folder that specheads train exported")
    add("--engine", default="auto", help="of this decoder")
    add("--threads", type=int, default=torch.get_num_threads(), help="of every process")
    add("--vllm-python", default=sys.executable, help="an interpreter with vLLM")
    add("--peers", nargs="+", choices=PEERS, default=PEERS)
    add("--prompts", type=int, default=8, help="reported ones; as many others choose the settings")
    add("--new-tokens", type=int, default=128)
    add("--repeats", type=int, default=5)
    add_keep_option(parser, "decoding")
    return parser.parse_args()


# --- what can be compared


def _all_peers(pair: Pair, given: Namespace, warp: Warp, folder: Path) -> _Peers:
    """Return everything that can be compared here.

    Files that peers read are written to `folder`.
    """
    peers = _Peers()
    head = str(Path(given.head).resolve()) if given.head else None
    if head is None:
        peers.left_out.append(
            "the head is left out: --head names one that specheads train exported."
        )
    setup = {"threads": given.threads, "warp": asdict(warp), "head": head}
    local = setup | {"model": given.model, "engine": given.engine}
    chosen = set(given.peers)
    if kept_tokens(pair.draft) is not None:
        chosen -= {TRANSFORMERS, VLLM}
        peers.left_out.append(
            "transformers and vLLM are left out: they need a draft with an output over all tokens."
        )
    if TRANSFORMERS in chosen:
        _add_transformers(peers, local)
    if OURS in chosen:
        _add_ours(peers, local)
    if VLLM in chosen:
        dtype = str(pair.target.dtype).removeprefix("torch.")
        setup |= {"dtype": dtype, "window": min(pair.window, WINDOW)}
        _add_vllm(peers, pair, setup, given.vllm_python, folder)
    return peers


def _by_length(options: Callable[[int], Options], lengths: Sequence[int]) -> dict[str, Options]:
    return {f"K={length}": options(length) for length in lengths}


def _by_threshold(
    options: Callable[[float], Options], thresholds: Sequence[float]
) -> dict[str, Options]:
    return {f"threshold {value}": options(value) for value in thresholds}


def _add_transformers(peers: _Peers, setup: Options) -> None:
    """Add transformers' generation: alone, assisted, by prompt lookup, and with the head."""
    command = PeerCommand(sys.executable, "local_worker.py", {**setup, "peer": TRANSFORMERS})
    peers.add(TRANSFORMERS, ALONE, {"": {}}, command)
    assisted = _by_length(_assistant, LENGTHS)
    assisted["heuristic"] = _assistant(5, "heuristic")
    assisted["confidence 0.4"] = _assistant(20, confidence=0.4)
    peers.add(TRANSFORMERS, "assisted", assisted, command)
    copied = _by_length(lambda length: {"prompt_lookup_num_tokens": length}, LENGTHS)
    peers.add(TRANSFORMERS, "prompt lookup", copied, command)
    if setup["head"]:
        by_head = _by_threshold(lambda value: _assistant(20) | {"threshold": value}, THRESHOLDS)
        peers.add(TRANSFORMERS, "assisted with the head", by_head, command)


def _add_ours(peers: _Peers, setup: Options) -> None:
    """Add this project's decoders: alone, with fixed lengths, and with the head."""
    command = PeerCommand(sys.executable, "local_worker.py", {**setup, "peer": OURS})
    peers.add(OURS, ALONE, {"": {"rule": ALONE}}, command)
    verifications = {"": {}}
    if setup["warp"]["temperature"]:
        verifications[", block verification"] = {"block": True}
    for name, block in verifications.items():
        fixed = _by_length(lambda length, b=block: {"rule": "fixed", "value": length} | b, LENGTHS)
        peers.add(OURS, f"fixed length{name}", fixed, command)
        if setup["head"]:
            by_head = _by_threshold(
                lambda value, b=block: {"rule": "head", "value": value} | b, THRESHOLDS
            )
            peers.add(OURS, f"head{name}", by_head, command)


def _assistant(
    tokens: int, schedule: str = "constant", confidence: float = 0.0
) -> dict[str, object]:
    """Return settings of the draft in transformers' assisted generation."""
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": confidence,
    }


def _add_vllm(peers: _Peers, pair: Pair, setup: Options, python: str, folder: Path) -> None:
    """Add vLLM from its environment: alone, with drafts of its draft model, and with the head on
    that.
    """
    if not can_import(python, "vllm"):
        peers.left_out.append(
            "vLLM is left out: it needs a separate environment (benchmarks/README.md);"
            " --vllm-python names it."
        )
        return
    folders = {"folder": str(folder / "target"), "draft_folder": str(folder / "draft")}
    for model, path in zip((pair.target, pair.draft), folders.values(), strict=True):
        model.save_pretrained(path)
        pair.tokenizer.save_pretrained(path)
    command = PeerCommand(python, "vllm_worker.py", {**setup, **folders})
    peers.add(VLLM, ALONE, {"": {"drafted": 0}}, command)
    drafted = _by_length(lambda length: {"drafted": length}, VLLM_LENGTHS)
    peers.add(VLLM, "draft model", drafted, command)
    copied = _by_length(lambda length: {"drafted": length, "copied": True}, VLLM_LENGTHS)
    peers.add(VLLM, "n-gram", copied, command)
    if setup["head"]:
        by_head = _by_threshold(
            lambda value: {"drafted": LONGEST, "threshold": value}, VLLM_THRESHOLDS
        )
        by_head["by measured times"] = {"drafted": LONGEST, "threshold": None}
        peers.add(VLLM, "head on the draft model", by_head, command)


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


def _speed_table(chosen: Sequence[Setting], measured: Mapping[str, Timed], mode: str) -> Table:
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
        row.append(_same_tokens(made, reference) if mode == "greedy" else None)
        for column in ("tokens", "draft", "verify", "commit"):
            rounds = made.totals["rounds"]
            row.append(made.totals[column] / rounds if rounds else None)
        rows.append(row)
    return Table(mode, MODES[mode][0], COLUMNS, rows)


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
