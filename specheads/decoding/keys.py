"""The keys of decoders and of `specheads generate`: all that can be checked without the classes of
strategies, which import torch.
"""

from typing import Annotated

from pydantic import AfterValidator

from specheads.decoding.engine_names import resolve_engine
from specheads.pair.generation_config import Warped
from specheads.settings import Flag, PositiveCount, Seed, Text, setting

EngineName = Annotated[Text, AfterValidator(lambda name: resolve_engine(name) and name)]


class DecoderKeys(Warped):
    """The keys of commands that decode, without the classes of strategies."""

    drafting: object = setting(None, "how tokens are proposed")
    verification: object = setting(None, "the rule that decides how much of a draft is kept")
    engine: EngineName = setting(
        "auto", "how models are run: auto (the fastest here), eager, compiled or cuda_graph"
    )


class GenerationKeys(DecoderKeys):
    """The keys of `specheads generate`, without the classes of strategies."""

    prompt: Text | None = setting(
        None, "what to answer; null: ask for prompts in the terminal, until Ctrl-D", min_length=1
    )
    max_new_tokens: PositiveCount = setting(256, "longest response, in tokens")
    seed: Seed = setting(0, "seed of everything that is sampled")
    compare: Flag = setting(False, "true: decode by the target alone, too, and say both speeds")
    head: Text | None = setting(
        "latest",
        "a folder of a head, a hub id, latest (the newest for this pair in paths.outputs, if there"
        " is one), or null for a rule without a head",
    )
    stopping: object = setting(
        None,
        "one stopping rule with one value for each of its keys; null: the head's best threshold, or"
        " without a head five tokens",
    )
