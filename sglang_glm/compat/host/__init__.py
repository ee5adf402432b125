"""Replacements on the CPU, one file an upstream module."""
