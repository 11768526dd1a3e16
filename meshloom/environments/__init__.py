"""Environments: what answers a model's turns, in processes that can be killed. Imports without torch."""

from meshloom.environments.protocol import Environment, Observation, Task, Turn

__all__ = ["Environment", "Observation", "Task", "Turn"]
