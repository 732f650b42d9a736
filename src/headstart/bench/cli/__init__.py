"""The commands of `headstart bench ...`: a table of experiments, and the verbs made from it or written by hand."""
