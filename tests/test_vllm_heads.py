"""The benchmark of heads in vLLM, with workers that answer at known speeds."""

import pytest

from benchmarks.vllm_heads import LENGTHS, PLAIN, best_of_lines, rows_of, seconds_of, speeds, ways


class Fake:
    """Workers whose ways to draft take known seconds for a request."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def ask(self, name, request):
        self.asked.append((name, len(request["prompts"]), request["seeds"]))
        return {"responses": request["prompts"], "seconds": [self.seconds(name) * len(request["prompts"])]}


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_every_way_has_a_process_of_its_own(method):
    made = ways("head", [0.5, 0.7], method)
    assert len({way.name for way in made}) == len(made)
    assert sum(way.options["drafted"] == 0 for way in made) == 1 and sum("head" in way.options for way in made) == 2
    assert len(made) == 1 + 1 + len(LENGTHS) + 2
    assert all(way.options["method"] == method for way in made if "method" in way.options)


def test_prompts_come_in_groups_of_a_level():
    workers, (way, *_) = Fake(lambda name: 2.0), ways("head", [0.5])
    assert seconds_of(workers, way, [[1]] * 5, 2, True, 8) == 10.0
    assert [count for _, count, _ in workers.asked] == [2, 2, 1]
    assert [seed for _, _, seeds in workers.asked for seed in seeds] == list(range(5))


def test_speeds_are_medians_of_turns():
    made = ways("head", [0.5])[:2]
    workers = Fake(lambda name: 1.0 if name == made[0].name else 2.0)
    found = speeds(workers, made, [[1]] * 8, 8, True, 10, repeats=2)
    assert found == {made[0].name: 10.0, made[1].name: 5.0}
    assert [name for name, *_ in workers.asked[:4]] == [way.name for way in (*made[::-1], *made)]


def test_a_line_is_its_fastest_choice_and_ratios_are_over_vllm_and_the_best_length():
    tried = ways("head", [0.5, 0.7])
    of_train = {way.name: 1.0 + (way.choice == "threshold 0.7") for way in tried}
    chosen = best_of_lines(tried, of_train)
    assert len({way.line for way in chosen}) == len(chosen)
    assert {way.choice for way in chosen} == {"", "threshold 0.7"}
    of_dev = {way.name: 10.0 for way in chosen} | {f"draft model, K={LENGTHS[1]}": 20.0}
    rows = rows_of("greedy", 4, chosen, of_dev)
    by_line = {row[2]: row for row in rows}
    assert by_line[PLAIN][4:] == [10.0, 1.0, 0.5] and by_line[f"draft model, K={LENGTHS[1]}"][4:] == [20.0, 2.0, 1.0]
