"""An input of heads of your own: the ratio of the two largest probabilities. See docs/extend.md.

Run it to train a head that reads the new input on the small embedded pair, with few prompts, and to
decode with that head.
"""

from pathlib import Path

import specheads
from specheads.heads.config import DEFAULT_INPUTS, KNOWN_INPUTS
from specheads.heads.features import FEATURES, DraftedToken, Feature, log_prob, second_prob


def second_share(drafted: DraftedToken) -> object:
    """Return the second largest probability over the largest one (...)."""
    return second_prob(drafted) * drafted.softmax.total


# In the project this is an entry of the table itself; decoder, store and replay read the table when
# they run.
FEATURES["second_share"] = Feature(second_share, transform=log_prob, reads_logits=True)
KNOWN_INPUTS["next_token"] += ("second_share",)


def main(folder: Path, num_prompts: int = 60) -> specheads.AcceptanceHead:
    """Train a head in `folder`, print how it decodes, and return it."""
    pair = specheads.load_pair("nano")
    source = specheads.NanoSource(num_prompts, 10, 10)
    generation = specheads.DataGeneration(max_new_tokens=32, max_prompt_tokens=128)
    data = specheads.generate_data(pair, source, generation, folder / "data")
    inputs = [*DEFAULT_INPUTS["next_token"], "second_share"]
    settings = specheads.HeadTraining(
        heads="lookahead", head={"inputs": inputs}, trainer={"max_epochs": 2}, calibration=None
    )
    texts = specheads.GeneratedData(data, list(source.load(pair.chats)), generation.limits)
    head = specheads.load_head(
        specheads.train_heads(pair, texts, settings, run=folder / "run").folder
    )
    rule = specheads.stopping.HeadThreshold(head)
    decoder = specheads.SpeculativeDecoder(
        pair, stopping=rule, warp=specheads.Warp(top_k=50), engine="eager"
    )
    print(head.config.inputs, decoder.generate("def mean(values):\n", max_new_tokens=32).stats)
    return head


if __name__ == "__main__":
    main(Path("outputs") / "new_head_input")
