"""A setup whose engines are real but for the executor, which computes nothing."""

from null_setup import failing, forgetful, make_setup, tiny

__all__ = ["failing", "forgetful", "make_setup", "tiny"]
