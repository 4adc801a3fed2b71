"""Training a draft with Lightning, to propose what its target would say.

The target stays out of the module's parameters and checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.stopping import FixedLength
from specheads.distill.divergences import forward_kl
from specheads.distill.laws import BATCH_TOKENS, padded
from specheads.distill.loss import LossSettings, laws_of, most_to_gain, slices, stored_laws, token_losses
from specheads.distill.on_policy import OwnResponses
from specheads.distill.samples import Sample
from specheads.pair import LanguageModel, Pair
from specheads.sampling import Warp, overlap
from specheads.training import CurveModule, OptimizerSettings, cosine_after_warmup

BLOCK = 4  # drafted tokens per round of the block efficiencies that are watched


@dataclass(frozen=True)
class LiveSettings:
    """What is decoded at every validation: so many dev prompts, each for so many tokens."""

    num_prompts: int = 4
    max_new_tokens: int = 64


@dataclass(frozen=True)
class Texts:
    """Samples as tensors: `tokens` (B, T), zeros behind their ends, and `judged` (B, T) bool, the places that the N learnt tokens come from."""

    tokens: Tensor
    judged: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> "Texts":
        texts = [torch.cat([torch.from_numpy(part) for part in (sample.prompt, sample.response)]).numpy() for sample in samples]
        tokens, judged = padded(texts, [len(sample.prompt) for sample in samples])
        return cls(tokens.to(device), judged.to(device))

    @property
    def learnt(self) -> Tensor:
        """The texts' own tokens (N,) at the learnt places."""
        return self.tokens[:, 1:][self.judged[:, :-1]]

    def states(self, lm: LanguageModel) -> Tensor:
        """Return a model's states (N, H) that the learnt tokens come from, on the texts' device."""
        parts = zip(*(x.split(max(1, BATCH_TOKENS // self.tokens.shape[1])) for x in (self.tokens, self.judged)), strict=True)
        found = [lm.hidden_states(tokens.to(lm.device), use_cache=False)[judged.to(lm.device)] for tokens, judged in parts]
        return torch.cat(found)


def block_efficiency(overlap: float, num_tokens: int = BLOCK) -> float:
    """Return the tokens that a round of `num_tokens` drafted ones yields where each is accepted with this chance (Leviathan et al. 2023)."""
    return sum(overlap**count for count in range(num_tokens + 1))


class DistillModule(CurveModule):
    """A draft, its loss against the target's laws, and what tells how good a draft it is."""

    def __init__(
        self,
        pair: Pair,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        warp: Warp,
        own: OwnResponses,
        refresh_every: int = 16,
        reference: LanguageModel | None = None,
        live: LiveSettings | None = None,
    ) -> None:
        """`warp` is decoding's, which the measures are taken under; `own` writes on-policy samples; `reference` chooses tokens (AdaSPEC)."""
        super().__init__()
        self.draft = pair.draft
        self.loss, self.optimizer, self.warp = loss, optimizer, warp
        self.own, self.refresh_every = own, refresh_every
        self.live = live or LiveSettings()
        self._models = (pair, reference)  # in a tuple, so that their weights are not taken for ours
        self._sums: list[Tensor] = []
        self.results: dict[str, dict[str, float]] = {}  # of the draft before and after, on test prompts

    @property
    def pair(self) -> Pair:
        return self._models[0]

    # --- training

    def on_fit_start(self) -> None:
        """Measure the draft as it is; write the curves of a run that is gone on with."""
        self.draft.to(self.device)
        if reference := self._models[1]:
            reference.model.to(self.device)
        self.log_history()
        if not self.history:
            self.results["before"] = self.measured_on("test")
            self.record({f"dev/{name}": value for name, value in self.measured_on("dev", live=True).items()}, beforehand=True)

    def training_step(self, samples: Sequence[Sample], batch_index: int) -> Tensor:
        data = self.trainer.datamodule
        if any(sample.response is None for sample in samples):
            count = self.refresh_every * self.trainer.accumulate_grad_batches * data.batch_size
            rows = data.splits["train"]
            upcoming = [rows[key] for key in data.upcoming(samples[0].key, count)]
            samples = self.own.answered(samples, upcoming)
        values, shares = self.losses(samples)
        # Lightning averages gradients over processes, so the sum is divided by the mean number of tokens.
        counts = self.all_gather(torch.tensor(float(len(values)), device=self.device))
        value = values.sum() / counts.mean()
        if self.is_recorded(batch_index):
            self.record({"train/loss": value.item(), "train/overlap": shares.mean().item()})
        self.log("loss", value.detach(), prog_bar=True, logger=False)
        return value

    def losses(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return the losses (N,) of the learnt tokens, of those that are chosen, and the overlaps at all learnt places."""
        pair, reference = self._models
        values, shares, references = [], [], []
        for stored in (True, False):
            some = [sample for sample in samples if (sample.law is not None) == stored]
            if not some:
                continue
            texts = Texts.of(some, self.device)
            if stored:
                ids, log_probs = (torch.cat([sample.law[name] for sample in some]) for name in ("ids", "log_probs"))
                laws = stored_laws(ids.to(self.device), log_probs.to(self.device))
            else:
                with torch.no_grad():
                    laws = laws_of(pair.target_lm, texts.states(pair.target_lm), self.loss)
            own = token_losses(pair.draft_lm, texts.states(pair.draft_lm), laws, texts.learnt, self.loss)
            values.append(own[0])
            shares.append(own[1])
            if reference:
                with torch.no_grad():
                    references.append(token_losses(reference, texts.states(reference), laws, texts.learnt, self.loss)[0])
        values, shares = torch.cat(values), torch.cat(shares)
        if references:
            values = values[most_to_gain(values.detach(), torch.cat(references), self.loss.token_share)]
        return values, shares

    def configure_optimizers(self) -> dict:
        settings = self.optimizer
        weights = [weight for weight in self.draft.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=settings.lr, weight_decay=settings.weight_decay)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_after_warmup(steps, settings.warmup_share))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # --- measures

    def validation_step(self, samples: Sequence[Sample], batch_index: int) -> None:
        self._sums.append(self.measures(samples))

    def on_validation_epoch_end(self) -> None:
        metrics = self._gathered() | self.live_measures()
        self.record({f"dev/{name}": value for name, value in metrics.items()})
        self.log("dev overlap", metrics["overlap"], prog_bar=True, logger=False)

    def test_step(self, samples: Sequence[Sample], batch_index: int) -> None:
        self._sums.append(self.measures(samples))

    def on_test_epoch_end(self) -> None:
        self.results["after"] = self._gathered()
        self.log_dict({f"test/{name}": value for name, value in self.results["after"].items()})

    @torch.no_grad()
    def measures(self, samples: Sequence[Sample]) -> Tensor:
        """Return (4,) sums over the tokens of the target's responses: overlap, KL(t || d), same likeliest token, and their number."""
        pair = self.pair
        texts = Texts.of(samples, self.device)
        states = [texts.states(lm) for lm in (pair.target_lm, pair.draft_lm)]
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for piece in slices(len(states[0]), pair.vocab_size):
            logits = [
                lm.logits(hidden[piece]).to(self.device)
                for lm, hidden in zip((pair.target_lm, pair.draft_lm), states, strict=True)
            ]
            likeliest = [own.argmax(-1) for own in logits]
            parts = (
                overlap(*map(self.warp, logits)).sum(),
                forward_kl(*(own.log_softmax(-1) for own in logits)).sum(),
                (likeliest[0] == likeliest[1]).sum(),
                torch.tensor(float(len(logits[0]))),
            )
            sums += torch.stack([part.double().to(self.device) for part in parts])
        return sums

    def measured_on(self, split: str, live: bool = False) -> dict[str, float]:
        """Return the measures of the draft as it is on a split."""
        was_training = self.draft.training
        self.draft.eval()
        self._sums = [self.measures(samples) for samples in self.trainer.datamodule.loader(split)]
        found = self._gathered() | (self.live_measures() if live else {})
        self.draft.train(was_training)
        return found

    def _gathered(self) -> dict[str, float]:
        """Return the means over what all processes have measured."""
        sums = torch.stack(self._sums).sum(0)
        self._sums = []
        sums = self.all_gather(sums).reshape(-1, len(sums)).sum(0)
        share, divergence, agreement = (sums[:3] / sums[3]).tolist()
        return {"overlap": share, "kl": divergence, "agreement": agreement, f"block_efficiency_{BLOCK}": block_efficiency(share)}

    @torch.no_grad()
    def live_measures(self) -> dict[str, float]:
        """Return the block efficiency of decoding some dev prompts with drafts of BLOCK tokens."""
        rows = self.trainer.datamodule.splits["dev"]
        prompts = [rows[0, row].prompt.tolist() for row in range(min(self.live.num_prompts, len(rows)))]
        if not prompts or shards_weights(self.trainer.strategy):
            return {}
        was_training = self.draft.training
        self.draft.eval()
        # Alone: other processes would wait for this one in any case.
        decoder = SpeculativeDecoder(self.pair, stopping=FixedLength(BLOCK), warp=self.warp, engine="eager")
        stats = [decoder.generate(prompt, self.live.max_new_tokens, seed=number).stats for number, prompt in enumerate(prompts)]
        self.draft.train(was_training)
        calls = sum(each.num_target_calls for each in stats)
        return {f"live_block_efficiency_{BLOCK}": sum(each.num_tokens for each in stats) / calls}

    # --- checkpoints

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        super().on_save_checkpoint(checkpoint)
        states: list = [self.own.state()]
        if self.trainer.world_size > 1:
            states *= self.trainer.world_size
            torch.distributed.all_gather_object(states, self.own.state())
        checkpoint |= {"own_responses": states, "results": self.results}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        super().on_load_checkpoint(checkpoint)
        self.own.load(checkpoint["own_responses"][self.trainer.global_rank])
        self.results = checkpoint["results"]


def shards_weights(strategy: Strategy) -> bool:
    """Whether no process has the whole draft."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)
