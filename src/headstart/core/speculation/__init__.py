"""Speculation by prompt lookup: drafts from known tokens, and their number by measured step times."""
