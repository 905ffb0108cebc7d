"""PyTorch kernels: attention that returns the log-sum-exp, and batched matmul on CPUs."""
