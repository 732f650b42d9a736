"""Structured output: what it supports, costs and withstands, judged by the JSON Schema test suite."""
