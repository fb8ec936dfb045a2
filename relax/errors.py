"""The one exception for what a user can put right: wrong flags, data or checkpoints."""


class UserError(Exception):
    """One plain message (what, where, which flag or row). Commands print it without a traceback and exit with code 2."""
