"""Benchmarks with one output contract: progress and tables on stderr, one JSON document as the last line of stdout."""
