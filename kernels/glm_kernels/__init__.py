"""Kernels for GLM's sparse attention. Tensors in, tensors out; nothing here knows SGLang."""
