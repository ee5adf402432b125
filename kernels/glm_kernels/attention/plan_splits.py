"""How many pieces a list of selected rows is divided into."""

TILE = 128  # two tiles of the matrix unit
MAX_SPLITS = 32
# Cost of starting a block (queries, first gather, write of its part), in tiles.
BLOCK_OVERHEAD_TILES = 1.0


def plan_splits(num_groups: int, list_length: int, num_sms: int) -> int:
    """Split count for the least time of the slowest multiprocessor, one block on each at a time.

    Args:
        num_groups: independent lists (tokens, or requests that share one).
        list_length: entries a list.
        num_sms: multiprocessors.

    Returns:
        Pieces a list, at least 1, at most 32 and its number of tiles of 128.
    """
    tiles = max(1, -(-list_length // TILE))

    def cost(splits: int) -> float:
        waves = -(-num_groups * splits // num_sms)
        # Joining the pieces reads each of them again.
        joining = 0.0 if splits == 1 else 1.0 + 0.05 * splits
        return waves * (-(-tiles // splits) + BLOCK_OVERHEAD_TILES) + joining

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=cost)
