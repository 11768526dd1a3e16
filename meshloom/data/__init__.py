"""Prompt sources, chat templates and the order of prompts. Imports without torch."""
