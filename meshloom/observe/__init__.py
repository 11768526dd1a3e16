"""What a run leaves behind and what it shows: run folder, metrics, loggers, live table, report, summary.

Each part is imported from its own module; nothing here imports torch.
"""
