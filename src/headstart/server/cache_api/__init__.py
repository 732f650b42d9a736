"""The routes about the prefix cache: statistics, explanations, and the schemas of their answers."""
