"""Device sources, compiled at first use by ``_jit``."""
