"""The command line of `headstart`: main.py and a file per verb or group of verbs."""
