"""What `benchmarks/peers.py` compares: the processes of each peer, its settings, and what is missing."""

import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gguf_file import obstacle, write_gguf
from benchmarks.peer_processes import Command, can_import
from specheads import Warp
from specheads.pair import Pair

LENGTHS = (1, 2, 3, 4, 6, 8)  # drafted tokens per round
VLLM_LENGTHS = (2, 3, 4, 6)  # each is a process of its own
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)
SAMPLED = Warp(temperature=1.0, top_k=50)


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
class Peers:
    """The commands of all workers by name, the settings, and why peers are left out."""

    commands: dict[str, Command] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, worker: str, command: Command, *settings: Setting) -> None:
        """Add a process and what it can do."""
        self.commands[worker] = command
        self.settings += settings


def all_peers(pair: Pair, arguments: Namespace, folder: Path) -> Peers:
    """Return everything that can be compared here; files that peers read are written to `folder`."""
    peers = Peers()
    folder.mkdir(parents=True, exist_ok=True)
    setup = {"model": arguments.model, "pair_keys": pair_keys(arguments), "threads": arguments.threads}
    setup |= {"temperature": SAMPLED.temperature, "top_k": SAMPLED.top_k}
    _add_transformers(peers, setup)
    setup |= {"dtype": str(pair.target.dtype).removeprefix("torch."), "window": min(pair.window, arguments.window)}
    for add in (_add_llama, _add_vllm):
        add(peers, pair, setup, arguments, folder)
    _add_specheads(peers, setup | {"engine": arguments.engine, "head": arguments.head})
    return peers


def pair_keys(arguments: Namespace) -> dict[str, str]:
    """Return what is loaded differently from the model's config."""
    return {"device": "cpu"} | ({"dtype": arguments.dtype} if arguments.dtype else {})


def _add_transformers(peers: Peers, setup: Mapping[str, Any]) -> None:
    def assistant(tokens: int, schedule: str = "constant", confidence: float = 0.0) -> dict[str, Any]:
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        return dict(zip(names, (tokens, schedule, confidence), strict=True))

    choices = {f"K={length}": assistant(length) for length in LENGTHS}
    choices |= {"heuristic": assistant(5, "heuristic"), "confidence 0.4": assistant(20, confidence=0.4)}
    line = "transformers, assisted"
    assisted = [Setting(line, choice, "transformers", options) for choice, options in choices.items()]
    command = Command(sys.executable, "transformers_worker.py", setup)
    peers.add("transformers", command, Setting("transformers, plain", "", "transformers"), *assisted)


def _add_llama(peers: Peers, pair: Pair, setup: Mapping[str, Any], arguments: Namespace, folder: Path) -> None:
    """Add llama-cpp-python, and the server with and without a draft model."""
    if reason := obstacle(pair.target) or obstacle(pair.draft):
        peers.left_out.append(f"llama.cpp is left out: {pair.name} has a model that cannot be written as GGUF: {reason}.")
        return
    if not can_import(sys.executable, "gguf"):
        peers.left_out.append('llama.cpp is left out: pip install "specheads[bench]" brings gguf, which writes its files.')
        return
    files = {"file": folder / "target.gguf", "draft_file": folder / "draft.gguf"}
    on_path = shutil.which("llama-server", path=arguments.llama_bin)
    binary = str(Path(on_path).resolve()) if on_path else None
    # The package and the binaries are one build where the binaries bring the library.
    bring = binary and any(Path(binary).parent.glob("libllama.*"))
    variables = {"LLAMA_CPP_LIB_PATH": str(Path(binary).parent)} if bring else {}
    has_package = can_import(arguments.llama_python, "llama_cpp", variables)
    if has_package or binary:
        for model, path in zip((pair.target, pair.draft), files.values(), strict=True):
            write_gguf(model, path)
    setup = {**setup, **{name: str(path) for name, path in files.items()}}
    # On a CPU it computes in half precision: it moves nano's logits by 0.015, all else in float32 by 0.00001.
    setup["flash_attention"] = setup["dtype"] != "float32"
    if has_package:
        command = Command(arguments.llama_python, "llama_worker.py", setup, variables)
        peers.add("llama.cpp", command, Setting("llama.cpp, plain", "", "llama.cpp"))
    else:
        peers.left_out.append(
            "llama-cpp-python is left out: pip install llama-cpp-python, or name its interpreter: --llama-python."
        )
    if binary:
        for length in (0, *LENGTHS):
            line = "llama.cpp, draft model" if length else "llama.cpp, server, plain"
            worker = f"llama-server {length}"
            command = Command(sys.executable, "llama_server_worker.py", setup | {"binary": binary, "drafted": length})
            peers.add(worker, command, Setting(line, f"K={length}" if length else "", worker))
    else:
        peers.left_out.append(
            "llama.cpp's draft-model speculation is left out: build llama-server (docs/measurements/speed.md) and name its "
            "folder: --llama-bin."
        )


def _add_vllm(peers: Peers, pair: Pair, setup: Mapping[str, Any], arguments: Namespace, folder: Path) -> None:
    """Add vLLM from its environment, one process for each number of drafted tokens."""
    if not can_import(arguments.vllm_python, "vllm"):
        peers.left_out.append(
            "vLLM is left out: it needs an environment of its own (docs/measurements/speed.md); --vllm-python names it."
        )
        return
    folders = {"folder": folder / "target", "draft_folder": folder / "draft"}
    for model, path in zip((pair.target, pair.draft), folders.values(), strict=True):
        model.save_pretrained(path)
        pair.tokenizer.save_pretrained(path)
    setup = {**setup, **{name: str(path) for name, path in folders.items()}, "compiled": not arguments.vllm_eager}
    for length in (0, *VLLM_LENGTHS):
        line = "vLLM, draft model" if length else "vLLM, plain"
        worker = f"vllm {length}"
        command = Command(arguments.vllm_python, "vllm_worker.py", setup | {"drafted": length})
        peers.add(worker, command, Setting(line, f"K={length}" if length else "", worker))


def _add_specheads(peers: Peers, setup: Mapping[str, Any]) -> None:
    """Add this project's decoders."""
    settings = [Setting("this decoder, alone", "", "specheads", {"rule": "alone"})]
    rules = {
        "this decoder, fixed length": {f"K={length}": {"rule": "fixed", "length": length} for length in LENGTHS},
        "this decoder, head": {f"threshold {value}": {"rule": "head", "threshold": value} for value in THRESHOLDS},
    }
    if not setup["head"]:
        peers.left_out.append("the head is left out: --head names one that train.py exported.")
        del rules["this decoder, head"]
    for line, choices in rules.items():
        for choice, options in choices.items():
            settings.append(Setting(line, choice, "specheads", options))
            block = options | {"verification": "block"}
            settings.append(Setting(f"{line}, block verification", choice, "specheads", block, sampled_only=True))
    peers.add("specheads", Command(sys.executable, "specheads_worker.py", setup), *settings)
