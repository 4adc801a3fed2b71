"""How far the ways of computing depart from each other: log probabilities, labels, heads, tokens.

Both models of a pair read the same texts, prompts and sampled responses, in every way: whole,
padded, a few tokens at a time from the KV cache, in rows of a batch, in compiled steps, with
prepacked weights. Everything is compared with float32 reading each text whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specheads import AcceptanceHead, HeadConfig, Pair, Warp, generate_baseline
from specheads.decoding.engine import EagerEngine, Engine, RowPlaces, make_engine
from specheads.decoding.engine.cpu import load_operators
from specheads.decoding.engine.cpu.packed import packed_model
from specheads.decoding.engine.eager import ForwardOutput
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import right_padded
from specheads.pair.sampling import accept_prob, overlap, sample
from specheads.prompts.sources import NanoSource

CHUNK = 5  # tokens that are read at a time
# tokens of a response that is read, and of one that is decoded
NUM_NEW = 48
NUM_GREEDY = 48
WARP = Warp()  # of labels
PROBABLE = (
    1e-3  # tokens of a larger probability count in the largest difference of log probabilities
)


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
    """What a model says after each position of the responses: states (N, H) and logits (N, V), in
    float64.
    """

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
    copies = packed_model(lm, []) if packed and load_operators() else None
    reader = make_engine(
        engine, lm if copies is None else copies.lm, max(len(text.whole) for text in texts) + CHUNK
    )
    step = reader.compiled_step(States(), all_logits=True)
    return joined(_of_response(*_from_memory(reader, step, text.whole), text) for text in texts)


def _from_memory(
    engine: Engine, step: Callable[..., Any], tokens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    engine.rewind(0)
    filled = [*tokens, *[0] * (-len(tokens) % CHUNK)]
    unused = torch.zeros(1)
    parts = []
    for first in range(0, len(filled), CHUNK):
        parts.append(
            [part.clone() for part in step(torch.tensor([filled[first : first + CHUNK]]), unused)]
        )
    hidden, logits = (torch.cat(kind)[: len(tokens)] for kind in zip(*parts, strict=True))
    return hidden, logits


@torch.no_grad()
def in_rows(lm: LanguageModel, texts: Sequence[Text]) -> Read:
    """Read the prompts into rows of one memory and the responses together, a few tokens of every
    row at a time.
    """
    longest = max(len(text.whole) for text in texts)
    engine = EagerEngine(lm, longest, num_rows=len(texts))
    parts = [[] for _ in texts]
    for row, text in enumerate(texts):
        states = engine.read_row(row, torch.tensor([text.prompt]))[0, -1:]
        parts[row].append((states, lm.logits(states)))
    step = engine.rows_step(RowStates())
    for first in range(0, max(len(text.response) for text in texts), CHUNK):
        read = [
            (row, place)
            for row, text in enumerate(texts)
            for place in range(first, min(first + CHUNK, len(text.response)))
        ]
        tokens = torch.tensor([[texts[row].response[place]] for row, place in read])
        places = torch.tensor(
            [[row, len(texts[row].prompt) + place] for row, place in read]
        ).T.contiguous()
        hidden, logits = step(tokens, longest, RowPlaces(*places))
        for number, (row, _) in enumerate(read):
            parts[row].append(
                (hidden[number : number + 1].clone(), logits[number : number + 1].clone())
            )
    pairs = [
        tuple(torch.cat(kind)[: len(text.response)] for kind in zip(*row, strict=True))
        for row, text in zip(parts, texts, strict=True)
    ]
    return joined(Read(hidden.double(), logits.double()) for hidden, logits in pairs)


def _states(lm: LanguageModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    hidden = lm.hidden_states(tokens, use_cache=False)[0]
    return hidden, lm.logits(hidden)


def _of_response(hidden: Tensor, logits: Tensor, text: Text) -> Read:
    """Return the states and logits that predict the tokens of a response, out of those of its whole
    text.
    """
    places = slice(len(text.prompt) - 1, len(text.whole) - 1)
    return Read(hidden[places].double(), logits[places].double())


def joined(reads: Iterator[Read]) -> Read:
    """Return all reads one after another."""
    hidden, logits = zip(*((read.hidden, read.logits) for read in reads), strict=True)
    return Read(torch.cat(hidden), torch.cat(logits))


# --- what differs


@dataclass(frozen=True)
class Departure:
    """How far a way of computing departs from another: the largest differences, and the shares of
    positions that differ.

    log_prob: of a token's log probability under the target, tokens above PROBABLE. overlap and
    label: of 1 - TV and of the acceptance probability of the same drafted token. head: of a head's
    prediction. most_likely: the target's most likely token is another. accepted: whether the
    draft's most likely token is the target's, is answered differently.
    """

    log_prob: float
    label: float
    mean_label: float
    overlap: float
    head: float
    most_likely: float
    accepted: float


@torch.no_grad()
def departure(
    exact: Mapping[str, Read], other: Mapping[str, Read], head: AcceptanceHead
) -> Departure:
    """Return how far `other` departs from `exact`: what the draft and the target read, by role."""
    logs = [read["target"].logits.log_softmax(-1) for read in (exact, other)]
    probable = logs[0].exp() > PROBABLE
    target, draft = (
        [WARP(read[role].logits) for read in (exact, other)] for role in ("target", "draft")
    )
    uniform = torch.rand(
        len(draft[0]), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    drafted = sample(draft[0], uniform)[:, None]
    labels = [
        accept_prob(t.gather(1, drafted)[:, 0], d.gather(1, drafted)[:, 0])
        for t, d in zip(target, draft, strict=True)
    ]
    overlaps = [overlap(t, d) for t, d in zip(target, draft, strict=True)]
    predicted = [
        torch.sigmoid(head({"hidden": read["draft"].hidden.float()}).double())
        for read in (exact, other)
    ]
    best = [read["target"].logits.argmax(-1) for read in (exact, other)]
    accepted = [
        read["draft"].logits.argmax(-1) == each
        for read, each in zip((exact, other), best, strict=True)
    ]
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
    """Return a head that reads the draft's state, untrained, with predictions spread from 0 to
    1.
    """
    torch.manual_seed(0)
    head = AcceptanceHead(
        HeadConfig(pair.draft_lm.hidden_size, depth=1, predicts="input_token", inputs=("hidden",))
    )
    torch.nn.init.normal_(head.readout.weight, std=0.5)
    return head.requires_grad_(False).eval()


def texts_of(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[Text]:
    """Return prompts with responses that the target samples."""
    return [
        Text(
            list(prompt),
            generate_baseline(pair, prompt, NUM_NEW, seed, engine="eager").tokens.tolist(),
        )
        for seed, prompt in enumerate(prompts)
    ]


def prompts_of(pair: Pair, number: int) -> list[list[int]]:
    """Return held-out prompts."""
    return [
        pair.encode_instruction(prompt.text) for prompt in NanoSource(0, number, 0).load(pair.chats)
    ]


def plain_greedy(pair: Pair, prompt: Sequence[int]) -> list[int]:
    """Return transformers' greedy response."""
    ids = torch.tensor([prompt])
    given = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NUM_GREEDY,
        "do_sample": False,
        "pad_token_id": 0,
    }
    return pair.target.generate(ids, **given)[0, len(prompt) :].tolist()
