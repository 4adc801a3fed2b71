"""Settings of `specheads load`."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.policy import MAX_TOKENS
from specheads.decoding.load.roofline import ACCELERATORS, MODELS, roofline
from specheads.errors import UserError
from specheads.evaluation.settings import RecordingSettings, ReplaySettings
from specheads.sampling import Warp
from specheads.settings import Built, PositiveCount, PositiveNumber, Seed, Settings, Text, setting


class LoadSettings(Settings):
    """What is simulated, besides the pair and its prompts."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    warp: Built[Warp] = setting(Warp(top_k=50), "how draft and target turn logits into probabilities")
    head: Text | None = setting(
        None, "a folder of a look-ahead head or of several, a hub id, latest, or null for policies without a head"
    )
    profile: Text | None = setting(
        None,
        "a speculation_profile.json, whose first data set says how often drafts are accepted, for policies that look at no "
        "draft; null: prompts are recorded with the pair",
    )
    num_prompts: PositiveCount = setting(100, "test prompts to record, which are reported")
    num_dev_prompts: PositiveCount = setting(100, "dev prompts to record, on which policies are fitted")
    max_new_tokens: PositiveCount = setting(512, "longest response, in tokens")
    record: RecordingSettings = setting(RecordingSettings(ground_truth=False), "how much of each response is recorded")
    costs: Text | None = setting(
        None, "a JSON file of measured seconds, see specheads.decoding.load.costs; null: a roofline of the three keys below"
    )
    accelerator: Text = setting("h200", f"the accelerator of the roofline: {', '.join(ACCELERATORS)}")
    target_size: Text = setting("8B", f"the target of the roofline, in bfloat16: {', '.join(MODELS)}")
    draft_size: Text = setting("1B", "the draft of the roofline, of the same sizes")
    concurrencies: tuple[PositiveCount, ...] = setting(
        (1, 16, 64, 256), "closed loops: requests that are always under way, each number for a table by itself"
    )
    rates: tuple[PositiveNumber, ...] = setting((), "open loops: requests that arrive per second in the mean (Poisson)")
    burst: PositiveCount = setting(1, "requests that arrive at once in open loops")
    max_batch: PositiveCount = setting(256, "requests that are decoded together in open loops; others wait")
    turnover: PositiveCount = setting(
        3, "how long a simulation is: requests for each place of the batch, at least 60 in all; in open loops 60 for each"
    )
    num_seeds: PositiveCount = setting(5, "simulations of each policy, with other arrivals and samples; intervals are over them")
    max_tokens: PositiveCount = setting(MAX_TOKENS, "longest draft of policies that choose its length, in tokens")

    @model_validator(mode="after")
    def _something_is_simulated(self) -> Self:
        if not self.concurrencies and not self.rates:
            raise UserError("concurrencies=[] and rates=[] leave nothing to simulate; use concurrencies=[1,64].")
        if self.profile is not None and self.head is not None:
            raise UserError(
                f"profile={self.profile} describes no drafts that head={self.head} could look at; leave one of the two out."
            )
        if self.costs is None:
            roofline(self.accelerator, self.target_size, self.draft_size)
        return self

    def replay_settings(self) -> ReplaySettings:
        """Return the settings of recording the prompts."""
        return ReplaySettings(
            seed=self.seed,
            warp=self.warp,
            num_prompts=self.num_prompts,
            num_dev_prompts=self.num_dev_prompts,
            max_new_tokens=self.max_new_tokens,
            record=self.record,
        )

    def load_costs(self) -> LoadCosts:
        """Return the costs of the simulation; raises UserError for a file that holds none."""
        return LoadCosts.read(Path(self.costs)) if self.costs else roofline(self.accelerator, self.target_size, self.draft_size)
