"""The paged cache of latents and index keys."""
