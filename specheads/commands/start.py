"""Where `specheads` begins: the imports of a verb take seconds, in which Ctrl-C and SIGTERM end it without a traceback."""

from specheads.interrupts import end_at_once


def main() -> None:
    """Run the command line of this process; see `specheads.commands.main`."""
    end_at_once()
    from specheads.commands.main import main as run

    try:
        run()
    finally:
        end_at_once()
