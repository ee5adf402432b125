"""What a GPU has put on NVLink, by the driver's own count."""

from __future__ import annotations

import torch

#: Of all links of a GPU together.
_ALL_LINKS = 0xFFFFFFFF


def sent_bytes() -> int | None:
    """Payload that the current device has sent so far, in steps of 1,024; None where nothing counts."""
    if not torch.cuda.is_available():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        field = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
        (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [field])
    except pynvml.NVMLError:
        return None
    return 1024 * value.value.ullVal if value.nvmlReturn == pynvml.NVML_SUCCESS else None
