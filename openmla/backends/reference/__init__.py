"""Reference implementation of every op in plain PyTorch: any device, any shape, slow and exact.

Each file computes in promote_types(dtype, float32). The same code is therefore the float64 ground
truth and the low-precision baseline against which the errors of other backends are measured.
"""
