"""Kernels in C++ for CPUs, built with the system's compiler and called through ctypes; without them, torch's own."""
