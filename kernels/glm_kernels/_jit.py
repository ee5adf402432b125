"""Compile device sources at first use and launch them: NVRTC and the driver, through ctypes.

NVRTC comes with torch, so no compiler need be installed; a source compiles in a second or two and
its binary is kept in a cache folder. Launches go to torch's current stream and can be captured in
graphs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import tempfile
from dataclasses import dataclass
from typing import ClassVar

import torch

CSRC = pathlib.Path(__file__).parent / "csrc"
_CUBIN_ARCH = "sm_90a"


def cache_dir() -> pathlib.Path:
    """Folder of compiled binaries: ``GLM_KERNELS_CACHE_DIR`` or ``~/.cache/glm_kernels``."""
    chosen = os.environ.get("GLM_KERNELS_CACHE_DIR")
    return pathlib.Path(chosen) if chosen else pathlib.Path.home() / ".cache" / "glm_kernels"


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    # torch's own packages hold it beside torch, in one of two folder layouts.
    site = pathlib.Path(torch.__file__).parent.parent / "nvidia"
    candidates = [name, *map(str, site.glob(f"*/lib/{name}"))]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise RuntimeError(
        f"_jit: {name} not found beside torch {torch.__version__}; install nvidia-cuda-nvrtc for "
        f"CUDA {torch.version.cuda}, or set GLM_KERNELS_BACKEND=torch to run without them"
    )


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver library."""
    return ctypes.CDLL("libcuda.so.1")


def check_driver(call: str, status: int) -> None:
    """Raise RuntimeError with the driver's text unless the status is success."""
    if status != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"_jit: {call} failed with {status} ({reason})")


def compile_source(source: str, arch: str = _CUBIN_ARCH) -> bytes:
    """Compile CUDA C++ text to a binary.

    Args:
        source: self-contained source; kernels are ``extern "C"``.
        arch: target, such as ``sm_90a``.

    Returns:
        The cubin.

    Raises:
        RuntimeError: with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"glm_kernels.cu", 0, None, None
    )
    flags = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"-lineinfo"]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    size = ctypes.c_size_t()
    if status != 0:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"_jit: NVRTC failed with {status}:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


@functools.cache
def header(name: str) -> str:
    """Text of ``csrc/{name}.cuh``, for the prelude of a source that uses it."""
    return (CSRC / f"{name}.cuh").read_text().replace("#pragma once", "")


def assemble(name: str, defines: tuple[tuple[str, int], ...], prelude: str) -> str:
    """Source of ``csrc/{name}.cu`` behind its definitions, the shared header and a prelude."""
    lines = [f"#define {key} {value}" for key, value in defines]
    return "\n".join([*lines, header("sm90"), prelude, (CSRC / f"{name}.cu").read_text()])


def _cached_cubin(source: str) -> bytes:
    key = hashlib.sha256(f"{_CUBIN_ARCH} {torch.version.cuda} {source}".encode()).hexdigest()[:32]
    path = cache_dir() / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = compile_source(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renaming is atomic: processes that compile at once each leave a whole file.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
        partial.write(cubin)
    os.replace(partial.name, path)
    return cubin


class _Attribute(ctypes.Structure):
    """The driver's ``CUlaunchAttribute``; its value is a union of 64 bytes."""

    _fields_: ClassVar = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int * 16),
    ]


class _Config(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_: ClassVar = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_PROGRAMMATIC_STREAM_SERIALIZATION = 6


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel of one device's context."""

    handle: ctypes.c_void_p
    shared_bytes: int
    device_index: int

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        args: list[torch.Tensor | int | float | bytes | None],
        early: bool = False,
    ) -> None:
        """Launch on torch's current stream.

        Args:
            grid: blocks in x, y and z.
            threads: threads a block.
            args: tensors and None pass as pointers, int as int32, float as fp32, bytes as a struct.
                Wider integers are not needed: offsets are formed on the device.
            early: the kernel may start once every block of the one before it has called
                ``let_next_kernel_start``. It must call ``wait_for_previous_kernel`` before it reads
                or writes anything that another kernel touches.

        Raises:
            RuntimeError: when the driver refuses the launch.
        """
        values: list[
            ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float | ctypes.Array[ctypes.c_char]
        ] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                values.append(ctypes.c_void_p(arg.data_ptr()))
            elif arg is None:
                values.append(ctypes.c_void_p(0))
            elif isinstance(arg, int):
                values.append(ctypes.c_int32(arg))
            elif isinstance(arg, bytes):
                values.append(ctypes.create_string_buffer(arg, len(arg)))
            else:
                values.append(ctypes.c_float(arg))
        packed = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        with torch.cuda.device(self.device_index):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value[0] = 1
            config = _Config(
                grid,
                (threads, 1, 1),
                self.shared_bytes,
                stream,
                ctypes.pointer(attribute),
                int(early),
            )
            status = driver().cuLaunchKernelEx(ctypes.byref(config), self.handle, packed, None)
        check_driver("cuLaunchKernelEx", status)


@functools.cache
def load_kernel(
    name: str,
    function: str,
    shared_bytes: int = 0,
    defines: tuple[tuple[str, int], ...] = (),
    prelude: str = "",
    device_index: int = 0,
) -> Kernel:
    """Compile (or take from the cache) and load one kernel; call an op once before capturing it.

    Args:
        name: source ``csrc/{name}.cu``.
        function: name of the ``extern "C"`` kernel.
        shared_bytes: dynamic shared memory of a block.
        defines: preprocessor definitions.
        prelude: text put after the shared header.
        device_index: CUDA device; modules belong to a device's context.

    Returns:
        The loaded kernel.

    Raises:
        RuntimeError: when compiling or loading fails.
    """
    cubin = _cached_cubin(assemble(name, defines, prelude))
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device_index):
        library = driver()
        context = ctypes.c_void_p()
        check_driver("cuCtxGetCurrent", library.cuCtxGetCurrent(ctypes.byref(context)))
        if not context:
            # A thread that has not used the device yet; it cannot be capturing a graph either.
            torch.cuda.synchronize()
        check_driver("cuModuleLoadData", library.cuModuleLoadData(ctypes.byref(module), cubin))
        check_driver(
            f"cuModuleGetFunction({function})",
            library.cuModuleGetFunction(ctypes.byref(handle), module, function.encode()),
        )
        if shared_bytes > 0:
            # Static shared memory counts towards the default limit too, so it is always raised.
            # 8 is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
            check_driver("cuFuncSetAttribute", library.cuFuncSetAttribute(handle, 8, shared_bytes))
    return Kernel(handle, shared_bytes, device_index)
