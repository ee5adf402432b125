"""Groups of ranks and what they exchange."""
