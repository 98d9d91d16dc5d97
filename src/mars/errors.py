"""The one exception a user is meant to see."""


class UserError(ValueError):
    """Something the user can fix; the message says what was wrong, what was given, what to do.

    The command line prints the message without a traceback and exits with status 2.
    """
