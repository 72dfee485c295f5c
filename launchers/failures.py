"""How a run that failed is told to its user. Needs no torch."""


class RunFailed(Exception):
    """A run ended before its last step. The text is all a user needs; the traceback is in the run's error.log."""


class WorkerFailed(RuntimeError):
    """A trainer rank or an engine died, raised or did not answer. The text names it."""
