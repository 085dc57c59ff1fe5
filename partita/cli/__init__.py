"""The command line: one file per command, only the chosen one is imported."""
