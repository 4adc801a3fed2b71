"""The rounds of a few rules in detail: the lengths of their drafts, and the outcome of each token of some responses."""

import numpy as np

from specheads.evaluation.candidate import Candidate, rule_fields
from specheads.evaluation.report import Positions, TextSample
from specheads.pair import Pair
from specheads.replay.recording import Recording
from specheads.replay.replay import Replayed

NUM_TEXTS = 3  # responses whose rounds are shown in color


def positions(candidate: Candidate, rounds: Replayed) -> Positions:
    """Return how many tokens a rule drafted and how many were accepted, by index in the round."""
    longest = int(rounds.drafted.max(initial=0))
    drafted, accepted = (
        [int((column > index).sum()) for index in range(longest)] for column in (rounds.drafted, rounds.accepted)
    )
    return Positions(candidate.family, candidate.name, drafted, accepted, **rule_fields(candidate))


def text_samples(pair: Pair, recording: Recording, candidate: Candidate, rounds: Replayed) -> list[TextSample]:
    """Return the first responses in pieces: accepted, rejected or emitted by the target in the rounds of the first sample."""
    samples = []
    for number in range(min(NUM_TEXTS, recording.num_prompts)):
        rows = np.flatnonzero((rounds.prompt == number) & (rounds.sample == 0))
        first, response, pieces = int(recording.first[number]), recording.response(number), []
        for row in rows[np.argsort(rounds.start[rows])]:
            start, drafted, accepted = (int(column[row]) for column in (rounds.start, rounds.drafted, rounds.accepted))
            middle = start + accepted
            branch = int(recording.branch_first[0, first + middle]) if drafted > accepted else 0
            rejected = recording.tokens[branch : branch + drafted - accepted].tolist()
            emitted = response[middle : start + int(rounds.tokens[row])]
            parts = (("accepted", response[start:middle]), ("rejected", rejected), ("target", emitted))
            pieces += [(kind, pair.decode(ids)) for kind, ids in parts if ids]
        samples.append(TextSample(candidate.name, pair.decode(recording.prompts[number]), pieces))
    return samples
