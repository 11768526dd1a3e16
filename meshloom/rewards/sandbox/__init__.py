"""Running a program that nobody trusts. Imports the standard library only: its server may run under another interpreter."""
