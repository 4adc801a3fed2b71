"""Settings of batches, chosen and fitted on a recording of dev prompts."""

from fakes import tiny_pair

from specheads import SpeculativeDecoder, Warp
from specheads.decoding.load_aware import LoadCosts
from specheads.evaluation.batches import best_fixed, load_aware
from specheads.evaluation.candidates import LOAD_AWARE
from specheads.evaluation.replayed_sets import survival
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.recording import Recorder, load_recording
from specheads.replay.response_tree import RecordSettings

# Draft steps cost next to nothing; from eight tokens on every token in flight costs as much as a third of a step.
ROWS = (1, 2, 3, 4, 8, 16, 64)
COSTS = LoadCosts(ROWS, [[0.01 * n + max(1.0, 1 + (rows * (1 + n) - 8) * 19 / 56) for n in range(9)] for rows in ROWS])


def recorded(pair, folder):
    prompts = [(Prompt(str(number), "dev", "a"), [number, 1]) for number in range(6)]
    settings = RecordSettings(num_samples=2, max_tokens=8)
    return load_recording(Recorder(pair, Warp(), ResponseLimits(12), settings, 0, folder).record([prompts])[0])


def test_more_rows_have_shorter_drafts(tmp_path):
    """Beyond eight tokens each costs a third of a step; the draft is the target, so that one row drafts as much as it may."""
    dev = recorded(tiny_pair(7, scale=2.0, same=True), tmp_path)
    settings = [best_fixed(dev, COSTS, (1, 3, 6), size) for size in (1, 8)]
    assert [setting.name for setting in settings] == ["fixed K=6", "fixed K=1"]
    assert settings[0].rule.max_tokens == 6 and settings[0].policy is None
    assert survival(dev, 5) == [1.0] * 5


def test_the_policy_decodes_with_what_was_measured(tmp_path):
    pair = tiny_pair(7, scale=2.0)
    dev = recorded(pair, tmp_path)
    shares = survival(dev, 8)
    assert len(shares) == 8 and shares == sorted(shares, reverse=True) and 0 < shares[0] < 1
    setting = load_aware(dev, COSTS)
    assert (setting.name, setting.family, setting.policy.max_tokens) == ("load-aware", LOAD_AWARE, 8)
    decoder = SpeculativeDecoder(pair, engine="eager")
    done = dict(decoder.generate_batch([[1], [2, 3], [4]], 2, 10, policy=setting.policy))
    assert sum(made.stats.num_accepted for made in done.values()) > 0
