"""The process in which functions of the user's own are tried before there is a run.

Owns: trying them where they can be killed. Refuses to know: deadlines, sockets (``killable.serving``). Always holds: what is
wrong is said in the words of a run, which tries them in its own process; torch is loaded there alone. The setup is an
``AlgorithmSettings``.
"""

from meshloom.config.settings import AlgorithmSettings
from meshloom.killable import serving
from meshloom.killable.process import Worker


class OwnWorker(Worker):
    """A process that tries functions of the user's own while it loads them."""

    module = "own_worker"
    called, setting, loading = "the algorithm's own functions", "algorithm", "while they are tried"


def serve(descriptor: int) -> None:
    """Try the functions of a setup, and wait for the end."""
    serving.serve(descriptor, _Tried)


class _Tried(serving.LoadOnly):
    """Answers nothing once its functions were tried."""

    def __init__(self, algorithm: AlgorithmSettings) -> None:
        from meshloom.algorithms.own_checks import check_own

        check_own(algorithm)
