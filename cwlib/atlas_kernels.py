"""Atlas: kernels."""
