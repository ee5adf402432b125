"""Measurements beside the peers: ``python -m glm_kernels.bench``."""
