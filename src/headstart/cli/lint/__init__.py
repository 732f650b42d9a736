"""The verb `lint`: a log of prompts, and what they lose of their prefix reuse."""
