"""Expert selection."""
