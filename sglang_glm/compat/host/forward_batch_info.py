"""Padding of a batch to what the other ranks of attention data parallelism hold."""


def use_pageable_memory() -> None:
    """Build the token counts in ordinary memory: pinned memory needs a CUDA driver."""
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = True


def check_pageable_memory() -> str | None:
    """None when the flag of `use_pageable_memory` stands."""
    from sglang.srt.model_executor import forward_batch_info

    return (
        None if forward_batch_info._is_cpu is True else f"_is_cpu is {forward_batch_info._is_cpu!r}"
    )
