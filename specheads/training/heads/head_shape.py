"""The settings of heads and of their loss: a list of values describes a head for each of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from specheads.errors import UserError
from specheads.heads.config import DEFAULT_INPUTS, KNOWN_INPUTS
from specheads.settings import Count, Flag, NonNegativeNumber, OneOrMore, PositiveCount, Settings, Text, setting

# What heads learn: min(1, t/d) of the token drafted after the response, its mean over tokens, or min(1, t/d) within rollouts too.
LABELS = ("sampled", "overlap", "rollout")


def check_label(label: str) -> str:
    """Return a label; raise UserError where no head is trained on it."""
    if label == "block":  # which heads of earlier versions were trained on
        raise UserError(
            "head.label=block is no longer supported: its predictions for single tokens do not multiply to the probability that "
            f"a block is accepted. Use one of {', '.join(LABELS)}; head.label=rollout serves verification=block too."
        )
    if label not in LABELS:
        raise UserError(f"head.label={label} must be one of {', '.join(LABELS)}; it is what the head learns.")
    return label


def _listed(value: Any) -> Any:
    """Return a list of input names, or of such lists, as tuples."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError("must be a list")  # noqa: TRY004 pydantic wants a ValueError
    if any(isinstance(name, str) for name in value) and not all(isinstance(name, str) for name in value):
        raise ValueError("mixes names and lists; give a list of names, or a list of such lists")
    return tuple(name if isinstance(name, str) else tuple(name) for name in value)


class HeadShape(Settings):
    """Kind, inputs and size of a head; a list of values trains a head with each, all in one pass over the draft's states."""

    predicts: Literal["next_token", "input_token"] = setting(
        "next_token",
        "next_token: the head predicts whether a token is accepted before the draft has read it; input_token (the paper's): "
        "after the draft has read it",
    )
    depth: OneOrMore[Count] = setting(3, "the number of residual blocks; 0: a linear head; or a list")
    width: OneOrMore[PositiveCount | None] = setting(
        None, "the width of the blocks; null: the draft's hidden size, for next_token an eighth of it, 8 to 256; or a list"
    )
    inputs: Annotated[tuple[str | tuple[str, ...], ...], BeforeValidator(_listed)] = setting(
        (),
        f"a list of {', '.join(KNOWN_INPUTS['input_token'])} and, for next_token, "
        f"{', '.join(name for name in KNOWN_INPUTS['next_token'] if name not in KNOWN_INPUTS['input_token'])}; "
        f"[]: {', '.join(DEFAULT_INPUTS['input_token'])} for input_token, {', '.join(DEFAULT_INPUTS['next_token'])} for "
        "next_token; or a list of such lists",
    )
    tied_blocks: Flag = setting(
        False,
        "true: one block of random weights, applied depth times, as in the code of SpecDec++'s authors; false: depth blocks, "
        "which begin as the identity",
    )
    label: OneOrMore[Annotated[Text, AfterValidator(check_label)]] = setting(
        "sampled",
        "what the head learns, from the probabilities t of the target and d of the draft; sampled: min(1, t/d) of a token "
        "drafted after the target's tokens; overlap: its mean, 1 - TV; rollout: min(1, t/d) after drafted tokens too (needs "
        "rollouts_per_response above 0); or a list",
    )


class HeadLoss(Settings):
    """Weights of the loss; a list of values trains a head with each."""

    accept_weight: OneOrMore[NonNegativeNumber] = setting(1.0, "the weight of a token's acceptance in the loss; or a list")
    reject_weight: OneOrMore[NonNegativeNumber] = setting(
        1.0, "the weight of a token's rejection in the loss; above 1 the head predicts more rejections (the paper: 6); or a list"
    )
    survival_weighted: OneOrMore[Flag] = setting(
        False, "true: weight a token within a rollout by the probability that all before it are accepted; or a list"
    )
