"""Kernels in C++ for CPUs, built with the system's compiler and called through ctypes. Without them, torch is used."""
