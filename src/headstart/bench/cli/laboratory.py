"""The laboratory: experiments and their data, in a distribution of their own (headstart-lab, the folder lab/).

Its parts are entry points: `verbs`, a typer app whose verbs join those of `headstart bench`, and `accuracy`, which
checks answers for `headstart bench intent`.
"""

from importlib.metadata import EntryPoint, entry_points

from headstart.core.errors import ConfigError

GROUP = "headstart.bench"
INSTALL = "pip install -e lab"


def find_lab_entry_point(name: str) -> EntryPoint | None:
    """Return a part of the laboratory, not yet imported; None: it is not installed."""
    return next(iter(entry_points(group=GROUP, name=name)), None)


def lab_not_installed_error(what: str) -> ConfigError:
    """Return the error for a feature of the laboratory where it is not installed."""
    return ConfigError(f"{what} is part of Headstart's laboratory, which is not installed; in a checkout: {INSTALL}")
