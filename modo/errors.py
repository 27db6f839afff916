"""The one exception for mistakes a user can mend."""


class UserError(ValueError):
    """A bad config, path, dataset or checkpoint.

    The message is a single line that holds the offending numbers and says what to do; entry
    points print it without a traceback and exit with status 2.
    """
