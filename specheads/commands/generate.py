"""`specheads generate` answers a prompt, or chats in the terminal, and says how fast that was."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pydantic import InstanceOf

from specheads.commands.compose import load_configured_pair, settings_of
from specheads.decoding.decoder import Baseline, Decoder, SpeculativeDecoder
from specheads.decoding.drafting import Autoregressive, Drafting
from specheads.decoding.keys import GenerationKeys
from specheads.decoding.records import DecodeStats, Generation
from specheads.decoding.stopping import FixedLength, HeadThreshold, StoppingRule
from specheads.decoding.verification import TokenVerification, Verification
from specheads.errors import UserError
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead, latest_head, load_head
from specheads.pair.pair import Pair
from specheads.storage.files import read_json, without_home

Given = str | list[dict[str, str]]  # a text, or a conversation

USUAL_THRESHOLD = 0.7  # of a head that recommends none


class Generating(GenerationKeys):
    """The settings of `specheads generate`."""

    drafting: InstanceOf[Drafting] = Autoregressive()
    verification: InstanceOf[Verification] = TokenVerification()


def check_strategies(cfg: DictConfig) -> None:
    """Raise UserError for strategies that a config describes in a way that they refuse."""
    _settings(cfg)
    _rule_keys(cfg)


def generate(cfg: DictConfig) -> None:
    """Answer the prompt of a composed config, or those that the user types."""
    pair = load_configured_pair(cfg)
    settings = _settings(cfg).for_pair(pair)
    where = _location(settings, settings.drafting.pair(pair), Path(cfg.paths.outputs))
    head = None if where is None else load_head(where)
    rule = rule_of(cfg, head)
    decoder = SpeculativeDecoder(
        pair, settings.drafting, rule, settings.verification, settings.warp, settings.engine
    )
    alone = Baseline(pair, settings.warp, settings.engine) if settings.compare else None
    _say(f"{rule!r}, {settings.verification.label}, {settings.warp}")
    if head is not None and rule.uses_head:
        _say(_of_head(head, without_home(str(where))))
    decoders: list[Decoder] = [decoder] if alone is None else [decoder, alone]
    if not all(each.is_warm for each in decoders):
        _say("compiling steps, or loading those that this machine has compiled before ...")
        for each in decoders:
            each.warm_up()
    conversation = list[dict[str, str]]()
    for prompt in _prompts(settings):
        conversation.append({"role": "user", "content": prompt})
        given: Given = prompt
        if pair.reads_chats:
            given = conversation
        answer = _answer(decoder, given, settings)
        conversation.append({"role": "assistant", "content": answer.text})
        _say(_speed(answer.stats))
        if alone is not None:
            _compare(alone, given, answer, settings)


def _settings(cfg: DictConfig) -> Generating:
    return settings_of(
        Generating,
        cfg,
        stopping=None,
        drafting=instantiate(cfg.drafting),
        verification=instantiate(cfg.verification),
    )


def _rule_keys(cfg: DictConfig) -> dict[str, object] | None:
    """Return the keys of the stopping rule of a config, with its class; None without one.

    Raises UserError for several rules, or for a key with several values.
    """
    names = list(cfg.stopping or {})
    if not names:
        return None
    if len(names) > 1:
        raise UserError(
            f"stopping names {len(names)} rules ({', '.join(names)}), and a decoder has one; write"
            f" for example 'stopping=[{names[-1]}]'."
        )
    (name,) = names
    rule = cast(dict[str, object], OmegaConf.to_container(cfg.stopping[name], resolve=True))
    for key, value in rule.items():
        if isinstance(value, list):
            raise UserError(
                f"stopping.{name}.{key}={value} are several values, and a decoder has one; write"
                f" for example stopping.{name}.{key}={value[0]}."
            )
    return rule


def _location(settings: Generating, pair: Pair, outputs: Path) -> str | Path | None:
    """Return where the head is; None where none is asked for, or none was trained yet."""
    if settings.head != "latest":
        return settings.head
    try:
        folder = latest_head(outputs, pair).parent
    except UserError:
        return None
    configs = [_config_of(path) for path in sorted(folder.glob("*/config.json"))]
    return folder / max(configs, key=_worth)[0]


def _worth(known: tuple[str, HeadConfig]) -> tuple[float, bool]:
    """Return by what the best of several heads is taken: its speed in the last evaluation, and
    without one whether it predicts before the draft's next step.
    """
    _, config = known
    speedup = (config.recommended or {}).get("speedup", 0.0)
    return float(speedup), config.predicts == "next_token"


def _config_of(path: Path) -> tuple[str, HeadConfig]:
    """Return the name of a head's folder, and the head's config."""
    return path.parent.name, HeadConfig.from_dict(read_json(path))


def _of_head(head: AcceptanceHead, where: str) -> str:
    """Return which head decodes, and what its evaluation recommends in its place."""
    known = head.config.recommended or {}
    text = f"the head is {where}"
    if known.get("use") == known.get("setting"):
        return text
    return f"{text}; its evaluation recommends {known['use']} in its place"


def rule_of(cfg: DictConfig, head: AcceptanceHead | None) -> StoppingRule:
    """Return the stopping rule: the one of the config, or the head's, or five tokens."""
    keys = _rule_keys(cfg)
    if keys is None:
        if head is None:
            return FixedLength()
        is_known = "threshold" in (head.config.recommended or {})
        return HeadThreshold(head, "auto" if is_known else USUAL_THRESHOLD)
    partial = instantiate(keys, _partial_=True, _convert_="all")
    if not partial.func.uses_head:
        return partial()
    if head is None:
        raise UserError(
            f"{partial.func.__name__} reads a head; give head=<folder> that specheads train"
            " exported."
        )
    return partial(head=head)


def _prompts(settings: Generating) -> Iterator[str]:
    """Yield the prompt of the settings, or those that the user types."""
    if settings.prompt is not None:
        yield settings.prompt
        return
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if text.strip():
            yield text


def _answer(decoder: Decoder, prompt: Given, settings: Generating) -> Generation:
    """Print a response while it is decoded, and return it."""
    stream = decoder.stream(prompt, settings.max_new_tokens, settings.seed)
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    return stream.generation


def _speed(stats: DecodeStats) -> str:
    text = (
        f"{stats.num_tokens} tokens, {stats.tokens_per_second:,.1f} a second,"
        f" {stats.block_efficiency:.2f} for each forward pass of the target"
    )
    if stats.acceptance_rate is None:
        return text
    return f"{text}; {stats.acceptance_rate:.0%} of the drafted tokens were accepted"


def _compare(alone: Decoder, prompt: Given, answer: Generation, settings: Generating) -> None:
    """Say how fast the target alone answers the same prompt, and whether greedy texts agree."""
    other = alone.generate(prompt, settings.max_new_tokens, settings.seed)
    speed = other.stats.tokens_per_second
    text = (
        f"target alone: {other.stats.num_tokens} tokens, {speed:,.1f} a second; with the draft"
        f" {answer.stats.tokens_per_second / speed:.2f} times as fast"
    )
    if settings.warp.temperature == 0:
        same = other.tokens.tolist() == answer.tokens.tolist()
        text += f", {'the same tokens' if same else 'other tokens, as rounding broke a tie'}"
    _say(text)


def _say(text: str) -> None:
    """Print what is not the response, next to it."""
    print(text, file=sys.stderr, flush=True)
