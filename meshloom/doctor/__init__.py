"""What this machine has, and what it lacks for a run: ``meshloom doctor``.

Owns: looking, without loading torch or touching a device. Refuses to know: how anything is executed.
"""
