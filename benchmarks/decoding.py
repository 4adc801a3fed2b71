"""How fast is decoding next to the peers: transformers, llama.cpp and vLLM, on the same weights?

    python benchmarks/decoding.py [--model nano] [--dtype float32] [--head outputs/head/<date_time>/heads/<name>]
        [--vllm-python PYTHON] [--at-once 1 4 16] [--prompts 8] [--repeats 5]
    python benchmarks/decoding.py --model my_pair --prompts-from questions.jsonl --modes greedy cool
    python benchmarks/decoding.py --model synthetic-21m --rate 0.8

Each peer is a separate process, or several, with the same number of threads. One process runs at
a time, all others stand still; in each repeat all settings decode the same prompts in turn. Before its
time counts, a setting decodes the first prompts once. Where a peer has several settings
(drafted tokens per round, a threshold), the fastest on other prompts is reported. Responses have
the same number of tokens everywhere: no token ends them. Seconds are those of whole calls.

llama.cpp runs the same weights in the same type. Where the target is a GGUF file, it runs both
models in float16, and the file's quantised tensors with the draft in 8 bits. A draft's output over
some tokens is completed for engines that need all.

With `--at-once` as many prompts are under way, and one that ends makes room for the next, in this
decoder and vLLM alone. With `--rate` drafted tokens are accepted at that rate, independent of the
models, and no other engine has a draft. A peer that is not installed is left out, with a line that
says how to get it. The steps of which decoding consists are timed by benchmarks.gpu.
"""

import argparse
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gguf_file import complete_output, file_type, obstacle, write_gguf
from benchmarks.peer_workers.processes import PeerCommand, Workers, can_import
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
from specheads.pair.config import pair_config
from specheads.pair.locations import unabbreviated
from specheads.pair.pair import Pair
from specheads.pair.revisions import gguf_file
from specheads.prompts.prompt import FINAL
from specheads.prompts.sources import DatasetSource, NanoSource, PromptSource

MODES = {
    "greedy": ("Greedy", Warp(temperature=0)),
    "sampled": ("Sampled at temperature 1, top-k 50", Warp(top_k=50)),
    "cool": ("Sampled at temperature 0.2, top-p 0.9", Warp(0.2, top_p=0.9)),
    "plain": ("Sampled at temperature 1", Warp()),
}
TEMPLATES = (
    "{instruction}\nInput: {input}",
    "{instruction}",
    "{question}",
    "{prompt}",
)  # of the files that --prompts-from names
TRANSFORMERS = "transformers"
OURS = "this decoder"
ALONE = "alone"
PEERS = (TRANSFORMERS, OURS, "llama.cpp", "vLLM")
LENGTHS, VLLM_LENGTHS = (
    (1, 2, 3, 4, 6, 8),
    (1, 2, 3, 4, 6),
)  # drafted tokens per round; with vLLM each is a separate process
FINAL_PARTS = (8, 9)  # of the final prompts, 200 together
FULL = 4  # prompts, for each that is under way
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)
VLLM_THRESHOLDS = (0.3, 0.5, 0.7)
LONGEST = 12
COLUMNS = [
    Column("setting"),
    *(Column(name, "fixed:0") for name in ("tokens/s", "slowest", "fastest")),
]
COLUMNS += [
    Column("over transformers", "ratio"),
    Column("over its target alone", "ratio"),
    Column("tokens as alone", "percent:1"),
]
COLUMNS += [
    Column("tokens per round", "fixed"),
    *(Column(stage, "ms") for stage in ("draft", "verify", "commit")),
]


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Of the settings of a peer with the same way, the fastest on the tuning prompts is reported.
    """

    peer: str
    way: str
    choice: str = ""  # among the settings of the way; empty where there is only one
    worker: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

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
        self,
        peer: str,
        way: str,
        choices: Mapping[str, Mapping[str, Any]],
        command: PeerCommand,
        apart: bool = False,
    ) -> None:
        """Add a way to decode, by name the options of its choices.

        `apart`: each starts a separate process with its options.
        """
        for choice, options in choices.items():
            setting = Setting(peer, way, choice, peer, options)
            if apart:
                setting = replace(setting, worker=setting.name, options={})
            self.settings.append(setting)
            self.commands[setting.worker] = (
                replace(command, setup={**command.setup, **options}) if apart else command
            )


@dataclass
class Timed:
    """What a setting made: tokens per second of each repeat, the responses of the first, and totals
    over rounds where known.
    """

    speeds: list[float] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    totals: list[list[float]] = field(
        default_factory=list
    )  # (rounds, tokens, seconds of the stages) of each prompt

    @property
    def speed(self) -> float:
        """Tokens per second, the median over repeats."""
        return statistics.median(self.speeds)


def main() -> None:
    given = _parsed_arguments()
    torch.set_num_threads(given.threads)
    pair = load_pair(given.model, **_pair_keys(given))
    most = max(_count(given, at_once) for at_once in given.at_once)
    loaded = list(_source(given.prompts_from, most).load(pair.chats))
    parts = {"tuning": loaded[:most], "reported": loaded[most:]}
    tuning, reported = (
        [pair.encode_instruction(prompt.text) for prompt in part] for part in parts.values()
    )
    tables = []
    notes = dict[str, None]()
    versions = dict[str, str]()
    for mode in given.modes:
        with tempfile.TemporaryDirectory() as folder:
            peers = _all_peers(pair, given, MODES[mode][1], Path(folder))
            print(*peers.left_out, sep="\n", file=sys.stderr)
            with Workers(peers.commands) as workers:
                for at_once in given.at_once:
                    count = _count(given, at_once)
                    of_several = {OURS, "vLLM"}
                    possible = [
                        each for each in peers.settings if at_once == 1 or each.peer in of_several
                    ]
                    chosen = fastest(
                        workers, possible, tuning[:count], given.new_tokens, 2, at_once
                    )
                    measured = measure(
                        workers, chosen, reported[:count], given.new_tokens, given.repeats, at_once
                    )
                    tables.append(_speed_table(chosen, measured, mode, at_once))
                    print(f"\n{tables[-1].title}\n\n{text_of(tables[-1])}", flush=True)
        versions |= workers.versions
        notes |= dict.fromkeys([*sorted(f"{line}." for line in workers.warnings), *peers.left_out])
    dtype = str(pair.target.dtype).removeprefix("torch.")
    shown = ", ".join(f"{name} {each}" for name, each in versions.items())
    about = (
        f"{pair.name} in {dtype}, {given.new_tokens} tokens, medians of {given.repeats} repeats."
        f" {shown}."
    )
    read = {name: prompt_record(each.prompt_id for each in part) for name, part in parts.items()}
    seeds = [1000 * repeat for repeat in range(given.repeats)]
    split = Path(given.prompts_from).name if given.prompts_from else FINAL
    write_result(
        "decoding",
        tables,
        split=split,
        seeds=seeds,
        prompts=read,
        notes=[about, *notes],
        keep=given.keep,
    )


def _parsed_arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="a file of conf/model")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: that of the model's config"
    )
    parser.add_argument("--device", default="cpu", help="on others llama.cpp and vLLM are left out")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["greedy", "sampled"])
    parser.add_argument(
        "--prompts-from",
        metavar="FILE",
        help=f"JSON lines with {', '.join(TEMPLATES[1:])}; default: final ones",
    )
    parser.add_argument("--head", help="a folder that specheads train exported")
    parser.add_argument(
        "--rate", type=float, help="accept drafted tokens at this rate: timing without text"
    )
    parser.add_argument("--engine", default="auto", help="of this decoder")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of every process"
    )
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument("--vllm-eager", action="store_true", help="do not compile vLLM's models")
    parser.add_argument(
        "--window", type=int, default=1024, help="positions that peers have memory for"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="prompts that are under way together",
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument(
        "--prompts",
        type=int,
        default=8,
        help="that are reported; as many others choose the settings",
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    add_keep_option(parser, "decoding")
    return parser.parse_args()


def _count(given: Namespace, at_once: int) -> int:
    """Return the number of prompts: enough that mostly `at_once` of them are under way."""
    return max(given.prompts, FULL * at_once if at_once > 1 else 1)


def _pair_keys(given: Namespace) -> dict[str, str]:
    """Return what is loaded differently from the model's config."""
    return {"device": given.device} | ({"dtype": given.dtype} if given.dtype else {})


def _source(file: str | None, count: int) -> PromptSource:
    """Return where `count` prompts that choose settings come from, and as many after them that are
    reported.
    """
    if file is None:
        return NanoSource(0, count, 0, count, FINAL_PARTS)
    return DatasetSource(file, None, "train", None, TEMPLATES, None, 2 * count, 0, 0, shuffled=True)


# --- what can be compared


def _all_peers(pair: Pair, given: Namespace, warp: Warp, folder: Path) -> _Peers:
    """Return everything that can be compared here.

    Files that peers read are written to `folder`.
    """
    peers = _Peers()
    head = given.head
    if not head:
        peers.left_out.append(
            "the head is left out: --head names one that specheads train exported."
        )
    setup: dict[str, Any] = {
        "threads": given.threads,
        "warp": asdict(warp),
        "head": head and str(Path(head).resolve()),
    }
    local = setup | {
        "model": given.model,
        "pair_keys": _pair_keys(given),
        "engine": given.engine,
        "rate": given.rate,
    }
    if TRANSFORMERS in given.peers:
        _add_transformers(peers, local)
    if OURS in given.peers:
        _add_ours(peers, local)
    if given.device == "cpu" and given.rate is None:
        setup |= {
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "window": min(pair.window, given.window),
        }
        complete_output(pair.draft)
        if "llama.cpp" in given.peers:
            _add_llama(
                peers,
                pair,
                setup,
                gguf_file(unabbreviated(pair_config(given.model).target)),
                folder,
            )
        if "vLLM" in given.peers:
            _add_vllm(
                peers,
                pair,
                setup | {"requests": max(given.at_once), "eager": given.vllm_eager},
                given,
                folder,
            )
    return peers


def _add_transformers(peers: _Peers, setup: Mapping[str, Any]) -> None:
    """Add transformers' generation: alone, assisted, by prompt lookup, and with the head."""
    command = PeerCommand(sys.executable, "local_worker.py", {**setup, "peer": TRANSFORMERS})
    peers.add(TRANSFORMERS, ALONE, {"": {}}, command)
    if setup["rate"] is None:
        fixed = {f"K={length}": _assistant(length) for length in LENGTHS}
        others = {
            "heuristic": _assistant(5, "heuristic"),
            "confidence 0.4": _assistant(20, confidence=0.4),
        }
        peers.add(TRANSFORMERS, "assisted", fixed | others, command)
        copied = {f"K={length}": {"prompt_lookup_num_tokens": length} for length in LENGTHS}
        peers.add(TRANSFORMERS, "prompt lookup", copied, command)
        if setup["head"]:
            by_head = {
                f"threshold {value}": _assistant(20) | {"threshold": value} for value in THRESHOLDS
            }
            peers.add(TRANSFORMERS, "assisted with the head", by_head, command)


def _add_ours(peers: _Peers, setup: Mapping[str, Any]) -> None:
    """Add this project's decoders: alone, with fixed lengths, and with the head."""
    command = PeerCommand(sys.executable, "local_worker.py", {**setup, "peer": OURS})
    peers.add(OURS, ALONE, {"": {"rule": ALONE}}, command)
    ways = {
        "fixed length": {f"K={length}": {"rule": "fixed", "value": length} for length in LENGTHS}
    }
    if setup["head"]:
        ways["head"] = {
            f"threshold {value}": {"rule": "head", "value": value} for value in THRESHOLDS
        }
    for way, choices in ways.items():
        peers.add(OURS, way, choices, command)
        if setup["warp"]["temperature"] and setup["rate"] is None:
            blocks = {choice: {**options, "block": True} for choice, options in choices.items()}
            peers.add(OURS, f"{way}, block verification", blocks, command)


def _assistant(tokens: int, schedule: str = "constant", confidence: float = 0.0) -> dict[str, Any]:
    """Return settings of the draft in transformers' assisted generation."""
    names = (
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
    )
    return dict(zip(names, (tokens, schedule, confidence), strict=True))


def _add_llama(
    peers: _Peers, pair: Pair, setup: Mapping[str, Any], source: Path | None, folder: Path
) -> None:
    """Add llama.cpp's server with and without a draft model, whose target may be the GGUF file
    `source`.
    """
    if reason := obstacle(pair.target) or obstacle(pair.draft):
        peers.left_out.append(
            f"llama.cpp is left out: {pair.name} has a model that cannot be written as GGUF:"
            f" {reason}."
        )
        return
    if not (can_import(sys.executable, "xllamacpp") and can_import(sys.executable, "gguf")):
        peers.left_out.append(
            'llama.cpp is left out: pip install "specheads[bench]", which brings its wheel and'
            " gguf."
        )
        return
    ways: dict[str, list[dict[str, Any]]] = {
        setup["dtype"]: [{}, {}]
    }  # how weights are stored, of the target and the draft
    if source is not None:
        ways = {
            "float16": [{"stored": "F16"}] * 2,
            file_type(source): [{"source": source}, {"stored": "Q8_0"}],
        }
    for name, stored in ways.items():
        files = {
            "file": folder / f"target-{name}.gguf",
            "draft_file": folder / f"draft-{name}.gguf",
        }
        for model, path, how in zip((pair.target, pair.draft), files.values(), stored, strict=True):
            write_gguf(model, path, **how)
        paths = {name: str(path) for name, path in files.items()}
        command = PeerCommand(sys.executable, "llama_worker.py", {**setup, **paths, "dtype": name})
        _add_by_length(
            peers, f"llama.cpp, {name}", command, LENGTHS, both=setup["warp"]["temperature"] > 0
        )


def _add_vllm(
    peers: _Peers, pair: Pair, setup: Mapping[str, Any], given: Namespace, folder: Path
) -> None:
    """Add vLLM from its environment: alone, with drafts of its draft model, and with the head on
    that.
    """
    if not can_import(given.vllm_python, "vllm"):
        peers.left_out.append(
            "vLLM is left out: it needs a separate environment (benchmarks/README.md);"
            " --vllm-python names it."
        )
        return
    if pair.draft.get_output_embeddings().bias is not None:
        peers.left_out.append(
            "vLLM is left out: its draft models have an output over all tokens, without a bias."
        )
        return
    folders = {"folder": folder / "target", "draft_folder": folder / "draft"}
    for model, path in zip((pair.target, pair.draft), folders.values(), strict=True):
        model.save_pretrained(path)
        pair.tokenizer.save_pretrained(path)
    command = PeerCommand(
        given.vllm_python,
        "vllm_worker.py",
        {**setup, **{name: str(path) for name, path in folders.items()}},
    )
    _add_by_length(peers, "vLLM", command, VLLM_LENGTHS)
    copied = {f"K={length}": {"drafted": length, "copied": True} for length in VLLM_LENGTHS}
    peers.add("vLLM", "n-gram", copied, command, apart=True)
    if setup["head"]:
        by_head = {
            f"threshold {value}": {"drafted": LONGEST, "threshold": value}
            for value in VLLM_THRESHOLDS
        }
        by_head["by measured times"] = {"drafted": LONGEST, "threshold": None}
        peers.add("vLLM", "head on the draft model", by_head, command, apart=True)


def _add_by_length(
    peers: _Peers, peer: str, command: PeerCommand, lengths: Sequence[int], both: bool = False
) -> None:
    """Add a peer alone and with drafts of its draft model, a process for each length.

    `both`: also with sampled drafts.
    """
    peers.add(peer, ALONE, {"": {"drafted": 0}}, command, apart=True)
    choices: dict[str, dict[str, Any]] = {f"K={length}": {"drafted": length} for length in lengths}
    if both:
        choices |= {
            f"{name}, sampled": {**options, "sampled": True} for name, options in choices.items()
        }
    peers.add(peer, "draft model", choices, command, apart=True)


# --- how it is compared


def fastest(
    workers: Workers,
    settings: Sequence[Setting],
    prompts: Sequence[list[int]],
    length: int,
    repeats: int,
    at_once: int = 1,
) -> list[Setting]:
    """Return the fastest setting of each way of each peer."""
    ways: dict[tuple[str, str], list[Setting]] = {}
    for setting in settings:
        ways.setdefault((setting.peer, setting.way), []).append(setting)
    several = [setting for group in ways.values() if len(group) > 1 for setting in group]
    speeds = {
        name: made.speed
        for name, made in measure(workers, several, prompts, length, repeats, at_once).items()
    }
    for name, speed in speeds.items():
        print(f"    tuning: {name}: {speed:,.0f} tokens/s", file=sys.stderr, flush=True)
    return [
        max(group, key=lambda setting: speeds.get(setting.name, 0.0)) for group in ways.values()
    ]


def measure(
    workers: Workers,
    settings: Sequence[Setting],
    prompts: Sequence[list[int]],
    length: int,
    repeats: int,
    at_once: int = 1,
) -> dict[str, Timed]:
    """Return what every setting made of the prompts, repeat by repeat in turn, with `at_once` of
    them under way.
    """
    together = (
        1 if at_once == 1 else len(prompts)
    )  # a worker gets them all, where several are under way
    measured = {setting.name: Timed() for setting in settings}
    for repeat in range(repeats if settings else 0):
        first = repeat % len(settings)
        for setting in (*settings[first:], *settings[:first]):
            made = measured[setting.name]
            seconds = 0.0
            for start in (
                None,
                *range(0, len(prompts), together),
            ):  # the first ones twice: once to warm up
                group = slice(0, at_once) if start is None else slice(start, start + together)
                seeds = [1000 * repeat + number for number in range(len(prompts))][group]
                request = {
                    "options": setting.options,
                    "prompts": prompts[group],
                    "length": length,
                    "seeds": seeds,
                }
                request |= {"at_once": at_once} if at_once > 1 else {}
                answer = workers.ask(setting.worker, request)
                if wrong := [
                    len(response) for response in answer["responses"] if len(response) != length
                ]:
                    raise ValueError(f"{setting.name} made {wrong[0]} tokens, not {length}")
                if start is not None:
                    seconds += answer["seconds"]
                    made.totals += [answer["totals"]] if "totals" in answer else []
                    made.responses += answer["responses"] if not repeat else []
            made.speeds.append(length * len(prompts) / seconds)
    return measured


def _speed_table(
    chosen: Sequence[Setting], measured: Mapping[str, Timed], mode: str, at_once: int = 1
) -> Table:
    """Return how fast each setting is, and in greedy decoding how many of its tokens are those of
    the target alone.
    """
    alone = {setting.peer: measured[setting.name] for setting in chosen if setting.way == ALONE}
    rows: list[list[Value]] = []
    for setting in chosen:
        made = measured[setting.name]
        over = made.speed / alone[TRANSFORMERS].speed if TRANSFORMERS in alone else None
        same = (
            _same_tokens(made, alone.get(OURS, alone[setting.peer])) if mode == "greedy" else None
        )
        rounds, *totals = (
            map(sum, zip(*made.totals, strict=True)) if made.totals else (1, *[None] * 4)
        )
        row = [
            setting.name,
            made.speed,
            min(made.speeds),
            max(made.speeds),
            over,
            made.speed / alone[setting.peer].speed,
            same,
        ]
        rows.append([*row, *(None if total is None else total / rounds for total in totals)])
    title = MODES[mode][0]
    if at_once == 1:
        return Table(mode, title, COLUMNS, rows)
    return Table(f"{mode}_{at_once}", f"{title}, {at_once} prompts under way", COLUMNS, rows)


def _same_tokens(made: Timed, alone: Timed) -> float:
    """Return the share of tokens before the first that differs: float sums in another order may
    swap two near equals.
    """
    counted = shared = 0
    for ours, theirs in zip(alone.responses, made.responses, strict=True):
        counted += len(ours)
        shared += next(
            (place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b),
            len(ours),
        )
    return shared / counted


if __name__ == "__main__":
    main()
