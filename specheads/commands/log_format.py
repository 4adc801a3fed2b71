"""The format of log lines."""

import logging

from specheads.storage.files import without_home


class WithoutHome(logging.Formatter):
    """A formatter that writes `~` for the user's home folder: logs are shown to others."""

    def format(self, record: logging.LogRecord) -> str:
        return without_home(super().format(record))
