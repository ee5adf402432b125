"""Trains the tiny GLM checkpoint that ships with the repository; README.md says how."""
