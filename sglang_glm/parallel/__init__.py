"""Division of the model over ranks, and what ranks exchange."""
