"""How many pieces a list of selected rows is divided into."""

TILE = 128  # two tiles of the matrix unit
MAX_SPLITS = 32
# Cost of starting a block (queries, first gather, write of its part), and of joining parts, in rows.
_OVERHEAD_ROWS = 128


def plan_splits(num_groups: int, list_length: int, num_sms: int, tile: int = TILE) -> int:
    """Split count for the least time of the slowest multiprocessor, one block on each at a time.

    Args:
        num_groups: independent lists (tokens, or requests that share one).
        list_length: entries a list.
        num_sms: multiprocessors.
        tile: entries that a block takes at once.

    Returns:
        Pieces a list, at least 1, at most 32 and its number of tiles.
    """
    tiles = max(1, -(-list_length // tile))
    overhead = _OVERHEAD_ROWS / tile

    def cost(splits: int) -> float:
        waves = -(-num_groups * splits // num_sms)
        # Joining the pieces reads each of them again.
        joining = 0.0 if splits == 1 else overhead + 0.05 * splits
        return waves * (-(-tiles // splits) + overhead) + joining

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=cost)
