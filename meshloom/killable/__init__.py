"""Processes that run code which may hang, die or lie, and can be killed: what reward functions and environments run in.

Imports without torch, and knows neither rewards nor environments.
"""
