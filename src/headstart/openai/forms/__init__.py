"""Fields, tools, items and parts beyond text and functions: the table of their treatment, and its readers."""
