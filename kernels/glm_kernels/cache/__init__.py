"""Byte layouts of the latent and index caches, and the writes into them."""
