"""verl's commands and settings, in our settings.

Owns: what verl's keys mean here. Refuses to know: files of rows, devices, how a run is done. Always holds: a key of a
command is translated, ignored because it does not matter, or refused with what to do; none is passed over.
"""

from meshloom.config.verl.translate import Translation, translate

__all__ = ["Translation", "translate"]
