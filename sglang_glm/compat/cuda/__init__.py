"""What wraps SGLang's functions on CUDA, one file an upstream module."""
