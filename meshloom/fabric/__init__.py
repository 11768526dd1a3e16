"""Worker processes, one a device, behind one object: calls, results, and what it means when one of them dies.

Owns: starting and ending processes on one machine or many, the channel between them, deadlines, the first cause of a failure.
Refuses to know: algorithms, models, what a verb does.
"""
