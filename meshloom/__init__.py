"""meshloom: reinforcement-learning post-training for language models.

Importing the package prepares the process (see ``config.environment``) and nothing more: no torch, no files, no devices.
"""

from meshloom.config.environment import prepare_process

__version__ = "0.1.0"

prepare_process()
