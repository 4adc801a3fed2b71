"""`python -m specheads.theory [key=value ...]`: the same as `specheads theory`."""

import sys

from specheads.commands.start import main

if __name__ == "__main__":
    sys.argv.insert(1, "theory")
    main()
