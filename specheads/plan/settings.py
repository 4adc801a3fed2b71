"""What a plan is for: the keys of `specheads plan`."""

from typing import Literal

from specheads.decoding.load.roofline import ACCELERATORS, BYTES_SHARE, OPERATIONS_SHARE
from specheads.settings import (
    Count,
    Flag,
    OpenProbability,
    PositiveCount,
    PositiveNumber,
    Settings,
    Share,
    Text,
    setting,
)

CPU = "cpu"


class PlanSettings(Settings):
    """The pair, the machine, the prompts, and what is assumed of texts and of the machine's efficiency."""

    model: Text = setting("llama2-7b", "a pair of conf/model")
    draft: Text | None = setting(None, "a folder or hub id in place of the pair's draft")
    target: Text | None = setting(None, "a folder or hub id in place of the pair's target")
    quantization: Text | None = setting(None, "how the target's weights are stored, as model.quantization")
    gpu: Text = setting("h100", f"one of {', '.join(ACCELERATORS)}, or cpu for the rates that were measured here")
    gpus: PositiveCount = setting(8, "the number of GPUs")
    prompts: PositiveCount = setting(52_000, "the number of prompts of all splits")
    prompt_tokens: PositiveNumber = setting(50, "mean number of tokens of a prompt with its template")
    response_tokens: PositiveNumber = setting(310, "mean number of tokens of a response; probe reports those of a pair")
    max_new_tokens: PositiveCount = setting(512, "the largest number of tokens of a response, as data.max_new_tokens")
    runner: Literal["local", "vllm"] | None = setting(
        None, "who answers the prompts; by default vllm, and local on a CPU or with quantization"
    )
    batch: PositiveCount | None = setting(None, "responses that are decoded together; by default 256 by vllm, 64 by local")
    samples: PositiveCount = setting(4, "drafted tokens per position, as generation.samples_per_position")
    heads: PositiveCount = setting(1, "the number of heads that are trained in one pass")
    epochs: PositiveCount = setting(12, "epochs of training")
    features: Literal["auto", "cached", "online"] = setting("auto", "whether the draft's states are stored, as features=")
    features_budget: PositiveNumber = setting(8, "the most GiB of stored states, as features_budget=")
    distill: Flag = setting(False, "whether the draft is distilled, too")
    eval_prompts: PositiveCount = setting(200, "prompts that are recorded: test prompts, and dev prompts to choose a threshold")
    live_prompts: Count = setting(32, "prompts that are decoded one by one, as num_live_prompts")
    decodings: PositiveCount = setting(
        20,
        "how often these are decoded: by the target and the rules that won, at measured costs again, on dev prompts",
    )
    acceptance: OpenProbability = setting(0.7, "the share of drafted tokens that are accepted")
    bytes_share: Share = setting(BYTES_SHARE, "the share of the memory's bandwidth that steps reach")
    operations_share: Share = setting(OPERATIONS_SHARE, "the share of the peak of operations that steps reach")
    disk: PositiveNumber = setting(1.0, "gigabytes per second that the disk writes and reads")
    price: PositiveNumber | None = setting(None, "the price of an hour of one GPU, for the column of costs")

    @property
    def answered_by(self) -> str:
        """Who answers the prompts."""
        return self.runner or ("local" if self.quantization or self.gpu == CPU else "vllm")

    @property
    def rows(self) -> int:
        """The number of responses that are decoded together, if memory allows."""
        return self.batch or {"vllm": 256, "local": 64}[self.answered_by]

    @property
    def text_tokens(self) -> float:
        """The mean number of tokens of a prompt and its response."""
        return self.prompt_tokens + self.response_tokens
