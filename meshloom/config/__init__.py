"""Settings of a run, and the errors of a user's input. Imports without torch."""

from meshloom.config.errors import UserError

__all__ = ["UserError"]
