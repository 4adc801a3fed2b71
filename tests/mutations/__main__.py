"""`python -m tests.mutations [number]`: mutate that many files of each kind, and print a table of
what their readers said.
"""

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.mutations.kinds import KINDS
from tests.mutations.trial import rows

COLUMNS = ("refused", "as before", "another value", "failed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "number",
        type=int,
        nargs="?",
        default=1000,
        help="mutations of each kind; a share where reading takes long",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--failures", type=int, default=3, help="shown of each kind")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(
        f"{'files':<32}{'mutations':>10}"
        + "".join(f"{name:>15}" for name in COLUMNS)
        + f"{'seconds':>9}"
    )
    total = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        for name, outcomes in rows(
            {name: KINDS[name] for name in arguments.kinds},
            Path(folder),
            arguments.number,
            arguments.seed,
        ):
            number = sum(outcomes.counts.values())
            total = total + number
            failed = failed + len(outcomes.failures)
            seconds = time.perf_counter() - start
            start = time.perf_counter()
            print(
                f"{name:<32}{number:>10}"
                + "".join(f"{outcomes.counts[each]:>15}" for each in COLUMNS)
                + f"{seconds:>9.1f}",
                flush=True,
            )
            for failure in outcomes.failures[: arguments.failures]:
                print(f"\n{failure}\n", flush=True)
    print(f"{total} mutated files, {failed} failures")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
