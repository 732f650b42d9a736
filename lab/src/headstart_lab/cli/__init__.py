"""The commands of the laboratory: a table of experiments, and the verbs made from it or written by hand."""
