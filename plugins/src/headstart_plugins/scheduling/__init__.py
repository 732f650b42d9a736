"""Scheduling for shared prefixes, as far as it does not depend on the engine: options, promises, the waiting order."""
