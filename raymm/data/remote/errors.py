"""What goes wrong with data, and with servers that have them."""

from raymm.errors import InputError


class DataError(InputError):
    """Bad data, or data that cannot be read; the message names the file, field or sample."""


class RemoteError(DataError):
    """A server does not give what it should, or gives another file than before. A file that is not
    there is a ``FileNotFoundError``: that is of one sample, this of all."""
