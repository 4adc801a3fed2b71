"""How far the ways of computing depart from each other: log probabilities, labels, heads, tokens.

    python benchmarks/numerics.py [--prompts 8] [--pairs nano,mini]

Both models of a pair read the same texts, prompts and sampled responses, in every way: whole, a few tokens at a time from memory,
in rows of a batch, in compiled steps, with packed maps, in bfloat16, quantized. Everything is compared with float32 reading each
text whole. Then greedy decoding in every way, against plain greedy generation by transformers of the same models.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import AcceptanceHead, HeadConfig, Pair, SpeculativeDecoder, Warp, generate_baseline, load_pair, stopping
from specheads.decoding.engine import EagerEngine, Engine, RowPlaces, make_engine, obstacle_to_compiling
from specheads.decoding.engine.eager import ForwardOutput
from specheads.decoding.engine.operators import load_operators
from specheads.decoding.engine.packed import packed_model
from specheads.language_model import LanguageModel
from specheads.padding import right_padded
from specheads.prompts.nano_source import NanoSource
from specheads.sampling import accept_prob, overlap, sample

CHUNK = 5  # tokens that are read at a time
NUM_NEW, NUM_GREEDY = 48, 48  # tokens of a response that is read, and of one that is decoded
WARP = Warp()  # of labels
PROBABLE = 1e-3  # tokens of a larger probability count in the largest difference of log probabilities
TYPES = {"bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Text:
    """A prompt and a response to it, as ids."""

    prompt: list[int]
    response: list[int]

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.response


@dataclass(frozen=True)
class Read:
    """What a model says after each position of the responses: states (N, H) and logits (N, V), in float64."""

    hidden: Tensor
    logits: Tensor


Reader = Callable[[LanguageModel, Sequence[Text]], Read]


class States:
    """The epilogue of a forward pass that returns its states and logits."""

    compile_key = ("states and logits",)

    def __call__(self, output: ForwardOutput, unused: Tensor) -> tuple[Tensor, Tensor]:
        return output.hidden[0] + 0 * unused, output.logits[0] + 0 * unused


class RowStates:
    """The same for a step in rows, which reads one token in each of them."""

    compile_key = ("states and logits of rows",)
    open_inputs: Sequence[tuple[int, ...]] = ()

    def __call__(self, output: ForwardOutput) -> tuple[Tensor, Tensor]:
        return output.hidden[:, 0], output.logits[:, 0]


# --- ways to read


@torch.no_grad()
def whole(lm: LanguageModel, texts: Sequence[Text]) -> Read:
    """Read each text in one forward pass."""
    return joined(_of_response(*_states(lm, torch.tensor([text.whole])), text) for text in texts)


@torch.no_grad()
def padded(lm: LanguageModel, texts: Sequence[Text]) -> Read:
    """Read all texts in one forward pass, padded to the right, as training and labels do."""
    hidden = lm.hidden_states(right_padded([text.whole for text in texts]), use_cache=False)
    return joined(
        _of_response(states[: len(text.whole)], lm.logits(states[: len(text.whole)]), text)
        for states, text in zip(hidden, texts, strict=True)
    )


@torch.no_grad()
def in_chunks(lm: LanguageModel, texts: Sequence[Text], engine: str, packed: bool = False) -> Read:
    """Read each text a few tokens at a time, from an engine's memory, as a decoder does."""
    reader = make_engine(engine, lm, max(len(text.whole) for text in texts) + CHUNK)
    step = reader.compiled_step(States(), all_logits=True)
    copies = packed_model(lm, []) if packed and load_operators() else None
    with copies.replacing() if copies is not None else nullcontext():
        return joined(_of_response(*_from_memory(reader, step, text.whole), text) for text in texts)


def _from_memory(engine: Engine, step: Callable[..., Any], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    engine.rewind(0)
    filled, unused = [*tokens, *[0] * (-len(tokens) % CHUNK)], torch.zeros(1)
    parts = []
    for first in range(0, len(filled), CHUNK):
        parts.append([part.clone() for part in step(torch.tensor([filled[first : first + CHUNK]]), unused)])
    hidden, logits = (torch.cat(kind)[: len(tokens)] for kind in zip(*parts, strict=True))
    return hidden, logits


@torch.no_grad()
def in_rows(lm: LanguageModel, texts: Sequence[Text]) -> Read:
    """Read the prompts into rows of one memory and the responses together, a few tokens of every row at a time."""
    longest = max(len(text.whole) for text in texts)
    engine, parts = EagerEngine(lm, longest, num_rows=len(texts)), [[] for _ in texts]
    for row, text in enumerate(texts):
        states = engine.read_row(row, torch.tensor([text.prompt]))[0, -1:]
        parts[row].append((states, lm.logits(states)))
    step = engine.rows_step(RowStates())
    for first in range(0, max(len(text.response) for text in texts), CHUNK):
        read = [(row, place) for row, text in enumerate(texts) for place in range(first, min(first + CHUNK, len(text.response)))]
        tokens = torch.tensor([[texts[row].response[place]] for row, place in read])
        places = torch.tensor([[row, len(texts[row].prompt) + place] for row, place in read]).T.contiguous()
        hidden, logits = step(tokens, longest, RowPlaces(*places))
        for number, (row, _) in enumerate(read):
            parts[row].append((hidden[number : number + 1].clone(), logits[number : number + 1].clone()))
    pairs = [
        tuple(torch.cat(kind)[: len(text.response)] for kind in zip(*row, strict=True))
        for row, text in zip(parts, texts, strict=True)
    ]
    return joined(Read(hidden.double(), logits.double()) for hidden, logits in pairs)


def _states(lm: LanguageModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    hidden = lm.hidden_states(tokens, use_cache=False)[0]
    return hidden, lm.logits(hidden)


def _of_response(hidden: Tensor, logits: Tensor, text: Text) -> Read:
    """Return the states and logits that predict the tokens of a response, out of those of its whole text."""
    places = slice(len(text.prompt) - 1, len(text.whole) - 1)
    return Read(hidden[places].double(), logits[places].double())


def joined(reads: Iterator[Read]) -> Read:
    """Return all reads one after another."""
    hidden, logits = zip(*((read.hidden, read.logits) for read in reads), strict=True)
    return Read(torch.cat(hidden), torch.cat(logits))


def ways(pair: Pair, compiled: bool) -> dict[str, Reader]:
    """Return the ways in which a pair in float32 can read texts here, by name, but whole; `compiled`: compiled steps, too."""
    readers: dict[str, Reader] = {
        "padded to a batch": padded,
        "from memory": partial(in_chunks, engine="eager"),
        "in rows of a batch": in_rows,
        "static memory": partial(in_chunks, engine="cuda_graph"),  # on a CPU, nothing is captured
    }
    if obstacle_to_compiling(pair.target_lm) is None:
        readers["packed maps"] = partial(in_chunks, engine="cuda_graph", packed=True)
        if compiled:
            readers["compiled"] = partial(in_chunks, engine="compiled")
    return readers


# --- what differs


@dataclass(frozen=True)
class Departure:
    """How far a way of computing departs from another: the largest differences, and the shares of positions that differ.

    log_prob: of a token's log probability under the target, tokens above PROBABLE. overlap and label: of 1 - TV and of the
    acceptance probability of the same drafted token. head: of a head's prediction. most_likely: the target's most likely token is
    another. accepted: whether the draft's most likely token is the target's, is answered differently.
    """

    log_prob: float
    label: float
    mean_label: float
    overlap: float
    head: float
    most_likely: float
    accepted: float


@torch.no_grad()
def departure(exact: Mapping[str, Read], other: Mapping[str, Read], head: AcceptanceHead) -> Departure:
    """Return how far `other` departs from `exact`: what the draft and the target read, by role."""
    logs = [read["target"].logits.log_softmax(-1) for read in (exact, other)]
    probable = logs[0].exp() > PROBABLE
    target, draft = ([WARP(read[role].logits) for read in (exact, other)] for role in ("target", "draft"))
    uniform = torch.rand(len(draft[0]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafted = sample(draft[0], uniform)[:, None]
    labels = [accept_prob(t.gather(1, drafted)[:, 0], d.gather(1, drafted)[:, 0]) for t, d in zip(target, draft, strict=True)]
    overlaps = [overlap(t, d) for t, d in zip(target, draft, strict=True)]
    predicted = [torch.sigmoid(head({"hidden": read["draft"].hidden.float()}).double()) for read in (exact, other)]
    best = [read["target"].logits.argmax(-1) for read in (exact, other)]
    accepted = [read["draft"].logits.argmax(-1) == each for read, each in zip((exact, other), best, strict=True)]
    return Departure(
        log_prob=(logs[1] - logs[0]).abs()[probable].max().item(),
        label=(labels[1] - labels[0]).abs().max().item(),
        mean_label=(labels[1] - labels[0]).abs().mean().item(),
        overlap=(overlaps[1] - overlaps[0]).abs().max().item(),
        head=(predicted[1] - predicted[0]).abs().max().item(),
        most_likely=(best[1] != best[0]).double().mean().item(),
        accepted=(accepted[1] != accepted[0]).double().mean().item(),
    )


def read_in(pair: Pair, reader: Reader, texts: Sequence[Text]) -> dict[str, Read]:
    """Return what draft and target read in some way."""
    return {"draft": reader(pair.draft_lm, texts), "target": reader(pair.target_lm, texts)}


def sensitive_head(pair: Pair) -> AcceptanceHead:
    """Return a head that reads the draft's state, untrained, with predictions spread from 0 to 1."""
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size, depth=1, predicts="input_token", inputs=("hidden",)))
    torch.nn.init.normal_(head.readout.weight, std=0.5)
    return head.requires_grad_(False).eval()


def texts_of(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[Text]:
    """Return prompts with responses that the target samples."""
    return [
        Text(list(prompt), generate_baseline(pair, prompt, NUM_NEW, seed, engine="eager").tokens.tolist())
        for seed, prompt in enumerate(prompts)
    ]


def other_pairs(name: str) -> dict[str, Pair]:
    """Return the pair in other types and quantizations that this machine can make, by name."""
    pairs = {name_of_type: load_pair(name, device="cpu", dtype=dtype) for name_of_type, dtype in TYPES.items()}
    if find_spec("torchao"):
        for quantization in ("int8", "fp8"):
            keys = {"quantization": quantization, "draft_quantization": quantization}
            pairs[quantization] = load_pair(name, device="cpu", dtype="float32", **keys)
    return pairs


def departures(name: str, num_prompts: int, compiled: bool) -> dict[str, Departure]:
    """Return how far every way to compute with a pair departs from float32 reading each text whole."""
    pair = load_pair(name, device="cpu", dtype="float32")
    texts, head = texts_of(pair, prompts_of(pair, num_prompts)), sensitive_head(pair)
    exact = read_in(pair, whole, texts)
    readers = ways(pair, compiled)
    measured = {way: departure(exact, read_in(pair, reader, texts), head) for way, reader in readers.items()}
    for other, changed in other_pairs(name).items():
        measured[other] = departure(exact, read_in(changed, whole, texts), head)
    return measured


def prompts_of(pair: Pair, number: int) -> list[list[int]]:
    """Return held-out prompts."""
    return [pair.encode_instruction(prompt.text) for prompt in NanoSource(0, number, 0).load(pair.chats)]


# --- greedy decoding


def greedy_rows(name: str, num_prompts: int, compiled: bool) -> list[list[Value]]:
    """Return for every way to decode how many greedy responses are those of transformers on the same models."""
    pairs = {"float32": load_pair(name, device="cpu", dtype="float32")} | other_pairs(name)
    rows: list[list[Value]] = []
    reference: list[list[int]] = []
    for kind, pair in pairs.items():
        prompts = prompts_of(pair, num_prompts)
        plain = [plain_greedy(pair, prompt) for prompt in prompts]
        reference = reference or plain
        engines = ["eager", "cuda_graph"]
        if compiled and kind == "float32" and obstacle_to_compiling(pair.target_lm) is None:
            engines.append("compiled")
        for engine in engines:
            decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(4), warp=Warp(temperature=0), engine=engine)
            single = [decoder.generate(prompt, NUM_GREEDY).tokens.tolist() for prompt in prompts]
            together = dict(decoder.generate_batch(prompts, 4, NUM_GREEDY))
            batched = [together[number].tokens.tolist() for number in range(len(prompts))]
            shown = "static memory" if engine == "cuda_graph" else engine
            for way, tokens in (("single", single), ("batched", batched)):
                rows.append([kind, shown, way, equal(tokens, plain), equal(tokens, reference)])
    return rows


def plain_greedy(pair: Pair, prompt: Sequence[int]) -> list[int]:
    """Return transformers' greedy response."""
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_GREEDY, "do_sample": False, "pad_token_id": 0}
    return pair.target.generate(ids, **given)[0, len(prompt) :].tolist()


def equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of responses that are equal."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


# --- tables

READ_COLUMNS = [Column("way"), Column("log prob", "fixed:7"), Column("label", "fixed:7"), Column("label, mean", "fixed:8")]
READ_COLUMNS += [Column("overlap", "fixed:7"), Column("head", "fixed:7")]
READ_COLUMNS += [Column("most likely token differs", "percent:2"), Column("greedy acceptance differs", "percent:2")]
GREEDY_COLUMNS = [Column("type"), Column("engine"), Column("decoding"), Column("as plain greedy of the same type", "percent:0")]
GREEDY_COLUMNS += [Column("as plain greedy in float32", "percent:0")]


def main() -> None:
    """Measure, print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--pairs", default="nano,mini")
    parser.add_argument("--compiled", default="nano", help="the pairs that are also measured in compiled steps")
    add_result_option(parser, "numerics")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    tables = []
    for name in given.pairs.split(","):
        compiled = name in given.compiled.split(",")
        measured = departures(name, given.prompts, compiled)
        rows: list[list[Value]] = [[way, *vars(each).values()] for way, each in measured.items()]
        title = (
            f"{name}: largest differences to float32 reading each text whole, {given.prompts} responses of up to {NUM_NEW} tokens"
        )
        tables.append(Table(f"read_{name}", title, READ_COLUMNS, rows))
        title = f"{name}: share of {given.prompts} greedy responses of up to {NUM_GREEDY} tokens that are equal"
        tables.append(Table(f"greedy_{name}", title, GREEDY_COLUMNS, greedy_rows(name, given.prompts, compiled)))
        print("\n\n".join(f"{table.title}\n\n{text_of(table)}" for table in tables[-2:]), flush=True)
    ids = [prompt.prompt_id for prompt in NanoSource(0, given.prompts, 0).load(False)]
    write_result(given.result, tables, split="dev", seeds=[0], prompts=prompt_record(ids))


if __name__ == "__main__":
    main()
