"""The lightning indexer: scores of every cached position, and the best of them."""
