"""When to stop drafting: small state machines on batched tensors that see numbers, never models.

A step follows each drafted token y_j (j = 1, 2, ...). Its features, all (B, ...): `token` (B,),
`draft_prob` (B,) d(y_j), `max_prob` (B,), `entropy` (B,) nats, `hidden` (B, H) the draft's hidden
state that y_j was sampled from (at the position that consumed y_{j-1}), `embedding` (B, E) the
draft's input embedding of y_j, `depth` (B,) j - 1. Probabilities are the draft's plain softmax,
whatever the decoder's warping, so that they are informative in greedy mode too. y_j itself is
always submitted: a rule says whether the draft ends with it.

A rule's numbers (a length, a threshold) are part of its state: a step that an engine compiled for
one rule serves all with the same compile key. A new rule is a subclass of StoppingRule and a config
in conf/stopping/ whose `_target_` names it.
"""

from specheads.decoding.stopping.logistic import (
    Logistic,
    OnlineHead,
    OnlineLogistic,
    logistic_inputs,
)
from specheads.decoding.stopping.rule import (
    MAX_TOKENS,
    Confidence,
    Fitting,
    FixedLength,
    MaxProbability,
    StoppingRule,
)
from specheads.decoding.stopping.survival import DraftProduct, HeadThreshold

__all__ = [
    "MAX_TOKENS",
    "Confidence",
    "DraftProduct",
    "Fitting",
    "FixedLength",
    "HeadThreshold",
    "Logistic",
    "MaxProbability",
    "OnlineHead",
    "OnlineLogistic",
    "StoppingRule",
    "logistic_inputs",
]
