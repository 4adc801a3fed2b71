"""Write a script with `# %%` cells as a notebook: `python examples/make_notebook.py
examples/real_pair.py`.
"""

import json
import re
import sys
from pathlib import Path


def notebook(script: str) -> dict:
    """Return the content of the notebook."""
    cells = []
    for number, part in enumerate(re.split(r"^# %%", script, flags=re.MULTILINE)[1:]):
        first, _, body = part.partition("\n")
        is_text = "[markdown]" in first
        lines = body.strip().splitlines()
        lines = [re.sub(r"^# ?", "", line) for line in lines] if is_text else lines
        source = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
        cell = {
            "cell_type": "markdown" if is_text else "code",
            "id": f"cell-{number}",
            "metadata": {},
            "source": source,
        }
        cells.append(cell if is_text else cell | {"execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    scripts = sys.argv[1:] or [Path(__file__).with_name("real_pair.py")]
    for path in map(Path, scripts):
        path.with_suffix(".ipynb").write_text(
            json.dumps(notebook(path.read_text()), indent=1) + "\n"
        )
