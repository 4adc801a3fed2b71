"""`specheads calibrate head=...`: fit the calibration of a trained head anew, on dev prompts like those that it is used on.

Predictions drift where prompts differ from those that a head was calibrated on; evaluations and decoders show it (accepted over
expected tokens). The head's weights stay, and so does a calibration that is as good. `specheads calibrate --help` lists all keys.
"""

from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.commands.compose import load_configured_pair, settings_of
from specheads.commands.evaluation import prompt_data
from specheads.decoding.stopping import MAX_TOKENS
from specheads.errors import UserError
from specheads.evaluation.head_folders import find_heads
from specheads.evaluation.recordings import Recorder
from specheads.prompts.prompt import unique
from specheads.replay.response_tree import RecordSettings
from specheads.sampling import Warp
from specheads.settings import Built, PositiveCount, Seed, Settings, Text, setting
from specheads.training.heads.calibrate import calibrate, is_kept
from specheads.training.heads.settings import Calibration


class Recalibration(Settings):
    """How a trained head is calibrated again."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    warp: Built[Warp] = setting(Warp(top_k=50), "how draft and target turn logits into probabilities")
    head: Text = setting("latest", "a local folder of a head or of several, or latest: the newest of this pair")
    max_new_tokens: PositiveCount = setting(512, "longest response, in tokens")
    calibration: Calibration = setting(Calibration(), "how many dev prompts, and how much of each response, are recorded")


def recalibrate(cfg: DictConfig) -> dict[str, dict[str, float]]:
    """Calibrate the heads that a composed config names; print and return the calibration errors before and after, by head.

    Raises:
        UserError: no such head, a head on the hub, no dev prompts that it did not learn from.
    """
    settings, data = settings_of(Recalibration, cfg), prompt_data(cfg)
    pair = load_configured_pair(cfg)
    located = find_heads(settings.head, pair, Path(cfg.paths.outputs), settings.warp)
    folders = [Path(each.where) for each in located.values()]
    if elsewhere := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(
            f"head={elsewhere[0]} is on the hub, and a calibration is written into a local folder; download it first."
        )
    limits = replace(data.limits, max_new_tokens=settings.max_new_tokens)
    amounts = RecordSettings(settings.calibration.num_samples, MAX_TOKENS, settings.calibration.batch_size)
    recorder = Recorder(pair, settings.warp, limits, amounts, settings.seed, Path(cfg.paths.data))
    errors = calibrate(settings.calibration.num_prompts, recorder, unique(data.source.load(pair.chats)), folders)
    for folder, (name, error) in zip(folders, errors.items(), strict=True):
        before = f"{error['before']:.1%} with its calibration" if "before" in error else f"{error['raw']:.1%} uncalibrated"
        print(f"{name}: expected calibration error {before}, {error['cross_fitted']:.1%} with one from other prompts of this set")
        if is_kept(error):
            print(f"{folder} left as it is: its calibration is at least as good on these prompts")
        else:
            print(f"{folder} calibrated; specheads evaluate head={folder} recommends a threshold for it")
    return errors


@command("calibrate", lambda cfg: [Generation, Recalibration])
def main(cfg: DictConfig) -> None:
    """Calibrate heads."""
    recalibrate(cfg)


if __name__ == "__main__":
    main()
