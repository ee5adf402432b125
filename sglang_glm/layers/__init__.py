"""CPU forwards of the indexer and the experts."""
