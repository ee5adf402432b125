"""Byte layout of the two caches. Standard library only, so that planners can import it.

A latent row of the packed form is 656 bytes: 512 e4m3 codes, four fp32 scales (one per 128 codes),
64 bf16 values of the rotary part. A page of the index cache holds 64 positions in 8,448 bytes: the
64 x 128 e4m3 key codes first, then the 64 fp32 scales.
"""

PAGE_SIZE = 64

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
MLA_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM

MLA_GROUP = 128
MLA_NUM_SCALES = KV_LORA_RANK // MLA_GROUP
MLA_SCALE_OFFSET = KV_LORA_RANK
MLA_ROPE_OFFSET = MLA_SCALE_OFFSET + 4 * MLA_NUM_SCALES
MLA_ROW_BYTES = MLA_ROPE_OFFSET + 2 * QK_ROPE_HEAD_DIM

INDEX_HEAD_DIM = 128
INDEX_SCALE_OFFSET = PAGE_SIZE * INDEX_HEAD_DIM
INDEX_PAGE_BYTES = INDEX_SCALE_OFFSET + 4 * PAGE_SIZE
INDEX_BYTES_PER_TOKEN = INDEX_PAGE_BYTES // PAGE_SIZE

FP8_MAX = 448.0
# Scales are products with this reciprocal, not quotients: that is what GPU code, stock and ours,
# computes for a division by a constant, and the bytes must not depend on the device.
FP8_MAX_INVERSE = 1.0 / 448.0
INDEX_AMAX_FLOOR = 1e-4


def index_key_offset(slot: int) -> int:
    """Byte offset of a slot's key codes from the start of the index cache."""
    page, row = divmod(slot, PAGE_SIZE)
    return page * INDEX_PAGE_BYTES + row * INDEX_HEAD_DIM


def index_scale_offset(slot: int) -> int:
    """Byte offset of a slot's fp32 scale from the start of the index cache."""
    page, row = divmod(slot, PAGE_SIZE)
    return page * INDEX_PAGE_BYTES + INDEX_SCALE_OFFSET + 4 * row


def mla_row_offset(slot: int) -> int:
    """Byte offset of a slot's packed latent row from the start of a layer's latent cache."""
    return slot * MLA_ROW_BYTES
