"""The errors that this package raises for bad input."""


class DataError(ValueError):
    """Something about the data is not as it must be. The message says what, and what to do."""


class RejectedDocumentsError(DataError):
    """The documents themselves are at fault, so that what was made of them is of no use.

    Whatever else goes wrong (the network, a cluster, a disk, files of a tokenizer) is a plain `DataError`, and the
    same call again goes on from the last finished part.
    """
