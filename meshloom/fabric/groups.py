"""The devices of a role behind one object.

Owns: a call by the dispatch and collect that the verb declares. Refuses to know: what the role is for. Always holds: a group's
verbs are those of the host class; another name is an error before anything is sent.
"""

from collections.abc import Mapping
from typing import Any

from meshloom.fabric.dispatch import GroupLayout
from meshloom.fabric.verbs import verbs_of
from meshloom.fabric.workers import Call, Workers


class WorkerGroup:
    """Workers that one role is on.

    Args:
        workers: of the run.
        layout: ranks of the role, and which of them are one replica.
        kind: class of the host object, whose verbs declare how they are dispatched.
    """

    def __init__(self, workers: Workers, layout: GroupLayout, kind: type) -> None:
        self._workers, self.layout, self._verbs = workers, layout, verbs_of(kind)

    def call(self, verb: str, arguments: Mapping[str, Any] | None = None, *, phase: str, deadline_s: float) -> Any:
        """Call a verb on all ranks of the group and collect.

        Raises:
            WorkerFault: if a worker fails, as ``Workers.call`` says.
        """
        results = self.submit(verb, arguments, phase=phase, deadline_s=deadline_s).result()
        return self.collected(verb, results)

    def submit(self, verb: str, arguments: Mapping[str, Any] | None = None, *, phase: str, deadline_s: float) -> Call:
        """Begin a call; ``collected`` makes one value of its result."""
        each = list(self._declared(verb).dispatch(arguments or {}, self.layout))
        return self._workers.submit(verb, each, ranks=self.layout.ranks, phase=phase, deadline_s=deadline_s)

    def collected(self, verb: str, results: list[Any]) -> Any:
        """What the verb's collect makes of the ranks' results."""
        return self._declared(verb).collect(results, self.layout)

    def _declared(self, verb: str) -> Any:
        if verb not in self._verbs:
            raise ValueError(f"there is no verb {verb!r}; verbs: {', '.join(self._verbs)}")
        return self._verbs[verb]
