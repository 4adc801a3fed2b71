"""specheads: acceptance-prediction heads (SpecDec++) and draft distillation for speculative decoding."""

from specheads.decoding import drafting, stopping, verification
from specheads.decoding.baseline import generate_baseline
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.errors import UserError
from specheads.heads.checkpoint import load_head, save_head
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.pair import Pair, load_pair
from specheads.sampling import Warp

__version__ = "0.1.0"

__all__ = [
    "AcceptanceHead",
    "HeadConfig",
    "Pair",
    "SpeculativeDecoder",
    "UserError",
    "Warp",
    "drafting",
    "generate_baseline",
    "load_head",
    "load_pair",
    "save_head",
    "stopping",
    "verification",
]
