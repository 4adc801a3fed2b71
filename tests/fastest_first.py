"""A plugin of pytest for runs of mutants: the fastest tests first, as the first one that fails ends
a run.
"""

import json
from pathlib import Path

# Where mutmut keeps them, in the folder that its tests run in.
DURATIONS = Path("mutmut-stats.json")


def pytest_collection_modifyitems(items):
    if DURATIONS.is_file():
        durations = json.loads(DURATIONS.read_text())["duration_by_test"]
        items.sort(key=lambda item: durations.get(item.nodeid, 0.0))
