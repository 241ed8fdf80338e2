"""The errors of moving weights."""


class WeightsError(RuntimeError):
    """A version could not be had: what was awaited, from whom, and what came instead."""


class VersionGoneError(WeightsError):
    """The server keeps the version no longer (or never had it); asking again is pointless."""
