"""The one error a user is meant to see: entry points print it without a traceback and exit with code 2."""


class UserError(ValueError):
    """Something the user gave does not fit; the message names the value, what was expected and the remedy."""
