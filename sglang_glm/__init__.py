"""GLM-5.x on SGLang: model, DSA backends, KV pool, MTP and planning. Imports nothing heavy."""

__version__ = "0.1.0"
