"""A paper's experiment repeated: its methods decode the same prompts, or are replayed on them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import yaml
from hydra.utils import get_class
from torch.nn.functional import cross_entropy

from benchmarks.papers.measures import METRICS, TIMED, Claim, Tally, checked, measured, priced, sums
from specheads.commands.compose import command_config, load_configured_pair
from specheads.commands.evaluate import evaluation_settings, prompt_data
from specheads.decoding.decoder import Baseline, Decoder, SpeculativeDecoder
from specheads.decoding.step_times import counted_share
from specheads.decoding.stopping import StoppingRule
from specheads.errors import UserError
from specheads.evaluation.prompt_sets import PromptSets
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import response_seed
from specheads.forecast import progress
from specheads.heads.head import AcceptanceHead, find_heads
from specheads.heads.metrics import auroc, binary_kl
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, states_of
from specheads.pair.sampling import Warp
from specheads.papers import LayerSkip
from specheads.papers.mjsd import BlockSearch
from specheads.prompts.prompt import EncodedPrompt, ResponseLimits
from specheads.replay.head_scores import record_sets
from specheads.replay.recording import GROUND_TRUTH, Recorder, Recording
from specheads.replay.replay import Counts, RecordedHead, head_logits, oracle, recorded_head, replay
from specheads.replay.response_tree import RecordSettings
from specheads.settings import config_folder

EXPERIMENTS = Path(__file__).with_name("experiments")
Heads = Mapping[str, AcceptanceHead]
Entry = Mapping[str, object]  # of a YAML or JSON file


def choice_of(group: str, given: str | Entry) -> partial:
    """Return what makes the choice of a file of conf/drafting, conf/stopping or conf/verification
    by its name, or of a mapping with `name` and other arguments.
    """
    changed = {"name": given} if isinstance(given, str) else dict(given)
    name = changed.pop("name")
    content = yaml.safe_load((config_folder() / group / f"{name}.yaml").read_text("utf-8"))
    return partial(get_class(content.pop("_target_")), **content | changed)


@dataclass(frozen=True)
class Method:
    """How prompts are decoded: the target alone (`baseline`), or drafts that are verified.

    Baselines are target (token by token), mjgd (the most likely `block` tokens together), and for
    replay oracle (drafts end before the first rejection).
    """

    name: str
    baseline: str | None = None
    block: int = 4
    beams: int = 8
    drafting: partial | None = None
    stopping: partial | None = None
    verification: partial | None = None
    warp: Warp | None = None  # None: the experiment's
    head: str | None = None  # None: the only one

    @classmethod
    def all_of(cls, entries: Sequence[Entry]) -> list["Method"]:
        """Return the methods of an experiment's file, one for each combination of listed values."""
        made = []
        for entry in entries:
            for each in each_value(entry):
                values = dict(each)
                for group in ("drafting", "stopping", "verification"):
                    if group in values:
                        values[group] = choice_of(group, values[group])
                if "warp" in values:
                    values["warp"] = Warp(**values["warp"])
                made.append(cls(**values))
        return made

    @property
    def uses_head(self) -> bool:
        """Whether its stopping rule reads a head."""
        return self.stopping is not None and self.stopping.func.uses_head

    def rule(self, heads: Heads | Mapping[str, RecordedHead]) -> StoppingRule | None:
        """Return its stopping rule, with its head; None for the verification rule's."""
        if self.stopping is None:
            return None
        if not self.uses_head:
            return self.stopping()
        return self.stopping(head=heads[self.head_name(heads)])

    def head_name(self, heads: Mapping[str, object]) -> str:
        """Return the name of its head. Raises UserError if that is not there."""
        name = self.head or next(iter(heads), None)
        if name not in heads:
            raise UserError(f"{self.name} needs the head {name}; head= has {', '.join(heads)}.")
        return name


def each_value(entry: Entry) -> Iterator[Entry]:
    """Yield an entry for each combination of its listed heads and values of its stopping rule.

    Its name has them in braces.
    """
    stopping = entry.get("stopping")
    values = {"head": entry.get("head"), **(stopping if isinstance(stopping, dict) else {})}
    listed = {key: value for key, value in values.items() if isinstance(value, list)}
    for combination in product(*listed.values()):
        chosen = dict(zip(listed, combination, strict=True))
        changed = dict(entry)
        changed["name"] = entry["name"].format(**chosen) if chosen else entry["name"]
        if "head" in chosen:
            changed["head"] = chosen.pop("head")
        if chosen:
            changed["stopping"] = {**entry["stopping"], **chosen}
        yield changed


@dataclass
class Experiment:
    """The settings of an experiment that are not those of `specheads evaluate`."""

    methods: Sequence[Entry]
    claims: Sequence[Entry]
    warp: Mapping[str, float]
    split: str = "dev"  # dev, test or final
    ratio: float = 4.8  # draft steps that a target pass takes; SpecDec++'s pair measured this
    replay: bool = False  # replay chains under token verification in place of decoding
    speeds: bool = True  # False: leave out what is timed, on a busy machine
    words: list[str] = field(default_factory=list)  # those for `specheads evaluate`

    @classmethod
    def read(cls, name: str, words: Sequence[str]) -> "Experiment":
        """Return the experiment of a file with the words of a command line."""
        made = cls(**yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text("utf-8")))
        made.words = ["head=null", "warp.min_p=0"]
        for key, value in made.warp.items():
            made.words.append(f"warp.{key}={value}")
        for word in words:
            key, _, value = word.partition("=")
            if key in ("methods", "claims", "split", "ratio", "replay", "speeds"):
                setattr(made, key, yaml.safe_load(value))
            else:
                made.words.append(word)
        if made.split == "final":
            made.words.append("split=final")
        return made


def run(name: str, words: Sequence[str]) -> dict[str, object]:
    """Return the measured methods and the checked claims of an experiment."""
    experiment = Experiment.read(name, words)
    cfg = command_config("evaluate", experiment.words)
    pair = load_configured_pair(cfg)
    settings = evaluation_settings(cfg).for_pair(pair)
    methods = Method.all_of(experiment.methods)
    located = find_heads(settings.head, pair, Path(cfg.paths.outputs), settings.warp)
    heads = {name: each.head for name, each in located.items()}
    sets = PromptSets(prompt_data(cfg), pair, located, settings)
    prompts = sets.dev if experiment.split == "dev" else sets.reported
    prompts = prompts.first(settings.num_prompts)
    if experiment.replay:
        recorder = Recorder(
            pair,
            settings.warp,
            ResponseLimits(settings.max_new_tokens),
            RecordSettings(),
            settings.seed,
            Path(cfg.paths.data),
        )
        tallies = replayed(recorder, methods, prompts.prompts, heads)
    else:
        longest = max(len(ids) for _, ids in prompts.prompts) + settings.max_new_tokens
        window = min(pair.window, longest)
        decoders = {}
        for method in methods:
            decoders[method.name] = decoder_of(method, pair, settings, heads, window)
        tallies = decoded(decoders, prompts.prompts, settings)
    tallies = {name: priced(tally, experiment.ratio) for name, tally in tallies.items()}
    claims = []
    not_run = []
    for claim in (Claim(**each) for each in experiment.claims):
        missing = any(np.isnan(sums(tallies[each], claim.metric)).any() for each in claim.methods)
        if missing or (claim.metric == TIMED and not experiment.speeds):
            not_run.append({"claims": claim.claims, "says": claim.says})
        else:
            claims.append(checked(claim, tallies, prompts.groups)._asdict())
    metrics = [name for name in METRICS if experiment.speeds or name != TIMED]
    return {
        "model": {"name": pair.name},
        "prompts": {
            "name": prompts.name,
            "split": experiment.split,
            **prompts.provenance(),
        },
        "ratio": experiment.ratio,
        "methods": measured(tallies, metrics, prompts.groups),
        "claims": claims,
        "not_run": not_run,
    }


def decoder_of(
    method: Method, pair: Pair, settings: Evaluation, heads: Heads, window: int
) -> Decoder:
    """Return the decoder of a method, with memory for `window` positions."""
    engine = settings.engine
    warp = method.warp or settings.warp
    if method.baseline == "target":
        return Baseline(pair, warp, engine, window)
    if method.baseline == "mjgd":
        return BlockSearch(pair, method.block, method.beams, warp, engine, window)
    if method.baseline == "oracle":
        raise UserError(f"{method.name} knows every outcome, so it cannot decode; use replay=true.")
    drafting = method.drafting() if method.drafting else None
    verification = method.verification() if method.verification else None
    rule = method.rule(heads)
    return SpeculativeDecoder(pair, drafting, rule, verification, warp, engine, window)


def decoded(
    decoders: Mapping[str, Decoder], prompts: Sequence[EncodedPrompt], settings: Evaluation
) -> dict[str, Tally]:
    """Return what each method did on prompts that all decode in turn, in an order that rotates."""
    order = list(decoders)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in order}
    for decoder in decoders.values():  # each decodes a prompt that is not counted
        decoder.warm_up()
        decoder.generate(prompts[0][1], settings.max_new_tokens, settings.seed)
    with progress("decoding", len(prompts) * len(order)) as advance:
        for number, (_, ids) in enumerate(prompts):
            seed = response_seed(settings.seed, number, 0)
            for name in order:
                row = decoded_row(decoders[name], ids, settings.max_new_tokens, seed)
                rows[name].append(row)
            order = [*order[1:], order[0]]
            advance(len(order))
    return {name: columns(of_method) for name, of_method in rows.items()}


def decoded_row(
    decoder: Decoder, ids: Sequence[int], max_new_tokens: int, seed: int
) -> dict[str, float]:
    """Decode a prompt; return its counts by name, its cost and its negative log-likelihood."""
    drafting = getattr(decoder, "drafting", None)
    out = decoder.generate(ids, max_new_tokens, seed)
    stats = out.stats
    draft_steps: float = stats.num_draft_calls
    target_passes: float = stats.num_target_calls
    if isinstance(drafting, LayerSkip):  # its steps are parts of target passes
        target_passes += drafting.share(decoder.pair) * draft_steps
        draft_steps = 0
    return {
        "num_tokens": stats.num_tokens,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "num_discarded": stats.num_discarded,
        "num_kept": stats.num_drafted - stats.num_discarded,  # accepted, without copies
        "num_target_calls": stats.num_target_calls,
        "num_draft_calls": stats.num_draft_calls,
        "decode_seconds": stats.decode_seconds,
        "draft_steps": draft_steps,
        "target_passes": target_passes,
        "head_steps": math.nan,
        "nats": response_nats(decoder.pair.target_lm, ids, out.tokens.tolist()),
    }


def columns(rows: Sequence[Mapping[str, float]]) -> Tally:
    """Return rows, which have the same names, as columns."""
    made = {}
    for name in rows[0]:
        made[name] = np.array([row[name] for row in rows], dtype=float)
    return made


@torch.no_grad()
def response_nats(lm: LanguageModel, prompt: Sequence[int], response: Sequence[int]) -> float:
    """Return the negative log-likelihood of a response to a prompt, in nats."""
    logits = lm.logits(states_of(lm, GivenTexts.with_responses([prompt], [response])))
    expected = torch.tensor(list(response), device=logits.device)
    return cross_entropy(logits, expected, reduction="sum").item()


def replayed(
    recorder: Recorder,
    methods: Sequence[Method],
    prompts: Sequence[EncodedPrompt],
    heads: Heads,
) -> dict[str, Tally]:
    """Return what each method does on recorded responses, with the cost and quality of its head.

    Raises UserError for a method that cannot be replayed.
    """
    for method in methods:
        is_chain = not (method.drafting or method.verification or method.warp)
        if not is_chain or not (method.stopping or method.baseline in ("target", "oracle")):
            raise UserError(f"replay=true, but {method.name} is more than a stopping rule.")
    known = {name: recorded_head(head) for name, head in heads.items()}
    rules = [method.rule(known) for method in methods if method.stopping]
    sets = record_sets(recorder, {"": prompts}, list(heads.values()), ground_truth=True)
    recording = sets[""]
    rounds = iter(replay(recording, rules))
    quality = {name: head_quality(recording, head) for name, head in known.items()}
    tallies = {}
    for method in methods:
        tokens = recording.lengths.numpy() * recording.num_samples
        if method.baseline == "target":
            counts = Counts(tokens, 0 * tokens, 0 * tokens, tokens[:, None])
        else:
            played = oracle(recording) if method.baseline else next(rounds)
            counts = played.per_prompt(recording.num_prompts)
        tally = {
            "num_tokens": counts.tokens,
            "num_drafted": counts.drafted,
            "num_accepted": counts.accepted,
            "num_kept": counts.accepted,
            "num_discarded": counts.discarded,
            "num_target_calls": counts.target_calls,
            "num_draft_calls": counts.drafted,
            "draft_steps": counts.drafted,
            "target_passes": counts.target_calls,
            "head_steps": 0 * counts.drafted,
        }
        if method.uses_head:
            name = method.head_name(heads)
            share = counted_share(heads[name], recorder.pair.draft_lm)
            tally |= {"head_steps": share * counts.drafted}
            tally |= quality[name]
        tallies[method.name] = {name: np.asarray(each, float) for name, each in tally.items()}
    return tallies


def head_quality(recording: Recording, head: RecordedHead) -> Tally:
    """Return by prompt the sums of what a head's divergence and AUROC are made of."""
    logits, _, _, node = head_logits(recording, head)
    truth = recording.features[GROUND_TRUTH][node].double()
    prompt = recording.prompt_of(node)
    rows = []
    for number in range(recording.num_prompts):
        here = prompt == number
        count = int(here.sum())
        accepted = truth[here].sum().item()
        pairs = accepted * (count - accepted)
        row = {"divergence": 0.0, "num_predicted": count, "num_in_order": 0.0, "num_pairs": pairs}
        if count:
            row["divergence"] = count * binary_kl(logits[here], truth[here]).item()
        if pairs:
            row["num_in_order"] = pairs * auroc(logits[here], truth[here])
        rows.append(row)
    return columns(rows)
