"""A host whose module starts a thread when it is imported, after which a process cannot be forked."""

import threading

from tests.fabric_hosts import Host

__all__ = ["Host"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
