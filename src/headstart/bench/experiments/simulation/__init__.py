"""Experiments with the simulator: sweeps, capacity plans, calibration on real steps."""
