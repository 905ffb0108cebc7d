"""The meaning of every op in plain PyTorch: any device, any shape, slow and exact.

Each file computes in promote_types(dtype, float32), so the same code is the float64 truth and
the low-precision peer that other backends' errors are measured against.
"""
