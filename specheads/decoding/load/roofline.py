"""Costs of a batch where nothing was measured, from the sizes of models and the data sheets of accelerators.

A step takes the larger of the time to read the weights and the time to compute, and the time to read cached keys and values.

Source: the roofline model (Williams et al. 2009). The sizes of models are those of their cards.
"""

from dataclasses import dataclass, replace

from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.errors import UserError

# Shares of the promised rates that steps of an 8B model in bfloat16 reach on an H200-class GPU: 4.5 ms for the weights, and
# 0.034 ms per token where computing takes longer. The other accelerators are assumed to reach the same shares.
BYTES_SHARE, OPERATIONS_SHARE = 0.74, 0.48


@dataclass(frozen=True)
class Accelerator:
    """What a data sheet promises, in units per second; operations are those of dense bfloat16 without sparsity.

    `float32_per_second` are operations in float32 outside of tensor cores; of all promised rates a step reaches the shares.
    """

    bytes_per_second: float
    operations_per_second: float
    source: str
    memory_bytes: float
    float32_per_second: float
    bytes_share: float = BYTES_SHARE
    operations_share: float = OPERATIONS_SHARE

    def read_seconds(self, num_bytes: float) -> float:
        """Return the seconds that reading bytes from its memory takes."""
        return num_bytes / (self.bytes_per_second * self.bytes_share)

    def compute_seconds(self, operations: float, float32: float = 0) -> float:
        """Return the seconds that operations in bfloat16, and others in float32, take."""
        promised = operations / self.operations_per_second + float32 / self.float32_per_second
        return promised / self.operations_share

    def together(self, count: int) -> "Accelerator":
        """Return `count` of them that share every weight and all work; what they send each other takes no time."""
        return replace(
            self,
            bytes_per_second=count * self.bytes_per_second,
            operations_per_second=count * self.operations_per_second,
            memory_bytes=count * self.memory_bytes,
            float32_per_second=count * self.float32_per_second,
        )


ACCELERATORS = {
    "h200": Accelerator(4.8e12, 989e12, "NVIDIA H200 Tensor Core GPU data sheet, SXM", 141e9, 67e12),
    "h100": Accelerator(3.35e12, 989e12, "NVIDIA H100 Tensor Core GPU data sheet, SXM", 80e9, 67e12),
    "a100": Accelerator(2.039e12, 312e12, "NVIDIA A100 80GB data sheet, SXM", 80e9, 19.5e12),
    "l40s": Accelerator(0.864e12, 362e12, "NVIDIA L40S data sheet", 48e9, 91.6e12),
    "l4": Accelerator(0.3e12, 121e12, "NVIDIA L4 data sheet", 24e9, 30.3e12),
    "rtx4090": Accelerator(1.008e12, 165.2e12, "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090", 24e9, 82.6e12),
}


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, in bfloat16 unless `bytes_per_parameter` says otherwise."""

    num_parameters: float
    bytes_per_position: float  # keys and values of all layers
    bytes_per_parameter: float = 2.0

    @property
    def weight_bytes(self) -> float:
        """The bytes of the weights."""
        return self.num_parameters * self.bytes_per_parameter

    def operations(self, num_tokens: float) -> float:
        """Return the operations of forward passes over tokens: a product and a sum for each weight and token."""
        return 2 * self.num_parameters * num_tokens

    def position_seconds(self, accelerator: Accelerator) -> float:
        """Return the seconds that reading the keys and values of one position takes."""
        return accelerator.read_seconds(self.bytes_per_position)

    def table(self, accelerator: Accelerator) -> SecondsTable:
        """Return the seconds of a step by its number of tokens, without reading the cached keys and values."""
        floor = accelerator.read_seconds(self.weight_bytes)
        per_token = accelerator.compute_seconds(self.operations(1))
        # The entry next to the ridge is the last at which reading the weights takes longer.
        ridge = max(int(floor / per_token), 2)
        return SecondsTable((1, ridge, ridge + 1, ridge + 2), (floor, floor, per_token * (ridge + 1), per_token * (ridge + 2)))


KV_8 = 2 * 8 * 128 * 2.0  # bytes of a layer: keys and values of 8 heads of 128 numbers; the 1B model's have 64
MODELS = {
    "0.25B": ModelSize(0.25e9, 1 * KV_8),  # an EAGLE-3 head for an 8B target, with its output embedding of reduced size
    "1B": ModelSize(1.236e9, 16 * KV_8 / 2),  # Llama 3.2 1B
    "3B": ModelSize(3.213e9, 28 * KV_8),  # Llama 3.2 3B
    "8B": ModelSize(8.03e9, 32 * KV_8),  # Llama 3.1 8B
    "70B": ModelSize(70.55e9, 80 * KV_8),  # Llama 3.1 70B
}


def roofline(accelerator: str, target: str, draft: str) -> LoadCosts:
    """Return the costs of a pair of MODELS on one of ACCELERATORS.

    Raises:
        UserError: a name that is not known.
    """
    for key, name, known in (
        ("accelerator", accelerator, ACCELERATORS),
        ("target_size", target, MODELS),
        ("draft_size", draft, MODELS),
    ):
        if name not in known:
            raise UserError(f"{key}={name} is not known; expected one of {', '.join(known)}.")
    device = ACCELERATORS[accelerator]
    provenance = {"target": target, "draft": draft, "device": accelerator, "dtype": "bfloat16", "command": "roofline"}
    return LoadCosts(
        MODELS[draft].table(device),
        MODELS[target].table(device),
        provenance | {"source": device.source},
        target_position=MODELS[target].position_seconds(device),
        draft_position=MODELS[draft].position_seconds(device),
    )
