"""`specheads <verb>` and `python -m specheads <verb>`: imports take seconds, in which Ctrl-C ends
them without a traceback.
"""

from specheads.interrupts import end_at_once


def main(verb: str | None = None) -> None:
    """Run the command line of this process; see `specheads.commands.main`."""
    end_at_once()
    from specheads.commands.main import main as run

    try:
        run(verb)
    finally:
        end_at_once()


if __name__ == "__main__":
    main()
