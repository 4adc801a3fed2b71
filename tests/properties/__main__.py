"""Try all properties: `python -m tests.properties`, or with many more examples `python -m
tests.properties --long`.

Other arguments are those of pytest.
"""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--long"]
    profile = "long" if "--long" in sys.argv else "suite"
    folder = str(Path(__file__).parent)
    sys.exit(pytest.main([folder, "-q", f"--hypothesis-profile={profile}", *arguments]))
